"""MessagePack-RPC without I/O: frozen messages, strict to and from the wire."""
