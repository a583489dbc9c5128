"""From responses to tables, text and JSON. Pure."""
