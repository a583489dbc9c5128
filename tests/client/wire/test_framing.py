"""Framing: any bytes give messages or typed errors, within limits of time and memory."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched_client.errors import GpuschedError, Invalid, NotFound, TooLarge
from gpusched_client.wire import framing, limits
from gpusched_client.wire.catalog import read_request
from gpusched_client.wire.framing import (
    Decoder,
    Malformed,
    NotificationFrame,
    RequestFrame,
    ResponseFrame,
)
from gpusched_client.wire.limits import REQUEST_BYTES_MAX

JOB: dict[str, Any] = {"argv": [b"true"], "cwd": b"/", "environment": {b"A": b"1"}}
SUBMIT = framing.encode_request(7, "submit", {"jobs": [JOB]})


def only(data: bytes) -> Any:
    (message,) = Decoder().feed(data)
    return message


def fatal(data: bytes) -> Malformed:
    decoder = Decoder()
    message = decoder.feed(data)[-1]
    assert isinstance(message, Malformed)
    assert message.is_fatal
    assert decoder.failure is message.error
    with pytest.raises(GpuschedError):
        decoder.feed(b"\x00")
    return message


def test_what_was_encoded_is_decoded() -> None:
    assert only(SUBMIT) == RequestFrame(7, "submit", {"jobs": [JOB]})
    assert only(framing.encode_response(7, {"a": 1})) == ResponseFrame(7, None, {"a": 1})
    assert only(framing.encode_notification("event", {"a": 1})) == NotificationFrame(
        "event", {"a": 1}
    )
    assert only(msgpack.packb([0, 1, "hello", []])) == RequestFrame(1, "hello", {})
    refusal = only(framing.encode_error(None, NotFound("no job 7", {"job_id": 7})))
    assert refusal.msgid is None
    assert isinstance(refusal.error, NotFound)
    assert refusal.error.data == {"job_id": 7}


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 4))
def test_messages_do_not_depend_on_how_the_bytes_are_cut(cuts: list[int], count: int) -> None:
    decoder, messages, data = Decoder(), [], SUBMIT * count
    for cut in [*cuts, len(data)]:
        messages += decoder.feed(data[:cut])
        data = data[cut:]
    assert messages == [only(SUBMIT)] * count
    assert not decoder.is_mid_message


def test_the_unfinished_message_is_seen_and_measured() -> None:
    decoder = Decoder()
    assert (decoder.is_mid_message, decoder.buffered_bytes) == (False, 0)
    assert decoder.feed(SUBMIT + SUBMIT[:5]) == [only(SUBMIT)]
    assert (decoder.is_mid_message, decoder.buffered_bytes) == (True, 5)
    assert decoder.feed(SUBMIT[5:]) == [only(SUBMIT)]
    assert decoder.buffered_bytes == 0


def test_a_whole_message_and_then_rubbish_gives_the_message_first() -> None:
    good, bad = Decoder().feed(SUBMIT + b"\xc1")
    assert isinstance(good, RequestFrame)
    assert isinstance(bad, Malformed)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xc1",
        msgpack.packb({}),
        msgpack.packb([]),
        msgpack.packb([3, 1, "hello", []]),
        msgpack.packb([True, 1, "hello", []]),
        msgpack.packb([0, 1, "hello"]),
        msgpack.packb([0, "1", "hello", []]),
        msgpack.packb([0, True, "hello", []]),
        msgpack.packb([0, -1, "hello", []]),
        msgpack.packb([0, 2**32, "hello", []]),
        b"\x91" * 5000,
    ],
)
def test_what_is_no_messagepack_rpc_is_invalid_and_ends_the_stream(data: bytes) -> None:
    assert fatal(data).error.code == "invalid"


@pytest.mark.parametrize(
    "message",
    [
        [0, 7, b"hello", []],
        [0, 7, "", []],
        [0, 7, "x" * 65, []],
        [0, 7, "hell\xf6", []],
        [0, 7, "hello", {}],
        [0, 7, "hello", None],
        [0, 7, "hello", [{}, {}]],
    ],
)
def test_a_broken_request_in_a_whole_envelope_is_answered_and_the_stream_goes_on(
    message: list[Any],
) -> None:
    broken, next_message = Decoder().feed(msgpack.packb(message) + SUBMIT)
    assert isinstance(broken, Malformed)
    assert (broken.msgid, broken.is_fatal, broken.error.code) == (7, False, "invalid")
    assert isinstance(next_message, RequestFrame)


def nested(levels: int) -> bytes:
    """A message whose containers are nested so deep."""
    return b"\x94\x00\x07\xa5hello" + b"\x91" * (levels - 1) + b"\xc0"


def test_64_levels_are_taken_and_65_are_invalid() -> None:
    assert isinstance(only(nested(64)), RequestFrame)
    message = only(nested(65))
    assert isinstance(message, Malformed)
    assert "64" in message.error.message


@pytest.mark.parametrize(
    ("field", "path"),
    [
        (b"\xa4gpus\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", "jobs[0].gpus"),  # NaN
        (b"\xa4gpus\xcf" + b"\xff" * 8, "jobs[0].gpus"),  # 2**64 - 1
        (b"\xa4gpus\xc3", "jobs[0].gpus"),  # true
        (b"\xa4gpus\xd4\x05x", "jobs[0].gpus"),  # an extension type
        (b"\xa4gpus\xd6\xff\x00\x00\x00\x00", "jobs[0].gpus"),  # a timestamp
        (b"\xa4name\xa2\xff\xfe", "jobs[0].name"),  # invalid UTF-8
        (b"\xa4name\xa3\xed\xa0\x80", "jobs[0].name"),  # a surrogate
        (b"\xa4name\xa2a\x00", "jobs[0].name"),  # NUL
        (b"\x07\xa1x", "jobs[0]"),  # an integer key
        (b"\xa3cwd\xa1/\xa3cwd\xa1/", "jobs[0]"),  # a duplicate key
    ],
)
def test_what_messagepack_can_say_and_we_cannot_is_invalid_by_path(field: bytes, path: str) -> None:
    entries = 2 if field.startswith(b"\xa3cwd") else 1
    data = b"\x94\x00\x07\xa6submit\x91\x81\xa4jobs\x91" + bytes([0x80 + entries]) + field
    message = only(data)
    assert isinstance(message, RequestFrame)
    with pytest.raises(Invalid) as caught:
        read_request(message.method, message.params)
    assert caught.value.data["path"] == path


def test_a_message_over_the_limit_is_too_large_and_names_the_request() -> None:
    data = msgpack.packb([0, 7, "submit", [b"x" * REQUEST_BYTES_MAX]])
    message = fatal(data)
    assert isinstance(message.error, TooLarge)
    assert message.msgid == 7
    assert str(REQUEST_BYTES_MAX) in message.error.message


def test_an_endless_message_is_cut_at_the_limit_also_in_small_pieces() -> None:
    decoder, fed = Decoder(), 0
    head, piece = b"\x94\x00\x07\xa6submit\xdd\x00\x00\xff\xff", (b"\xda\x03\xe8" + b"x" * 1000)
    messages = decoder.feed(head)
    while not messages and fed < 2 * REQUEST_BYTES_MAX:
        messages = decoder.feed(piece)
        fed += len(piece)
    assert isinstance(messages[0], Malformed)
    assert isinstance(messages[0].error, TooLarge)
    assert fed < REQUEST_BYTES_MAX + 70_000


def test_a_client_refuses_to_send_what_the_daemon_would_not_take() -> None:
    with pytest.raises(TooLarge):
        framing.encode_request(1, "submit", {"x": b"x" * REQUEST_BYTES_MAX})
    with pytest.raises(Invalid, match=r"^jobs\[0\]\.name: 'a\\xff' is not valid UTF-8; send"):
        framing.encode_request(1, "submit", {"x": 1, "jobs": [{"id": 2, "name": "a\udcff"}]})
    with pytest.raises(Invalid, match="'\\\\xff' is not valid UTF-8"):
        framing.encode_request(1, "submit", {"\udcff": 1})
    with pytest.raises(Invalid):
        framing.encode_request(1, "submit", {"x": 2**64})


# ------------------------------------------------------------------- hostile but well-formed


def bombs() -> dict[str, bytes]:
    """Messages of up to 1 MiB that cost their reader the most."""
    head = b"\x94\x00\x07\xa6submit"
    wide = b"\xdc\xff\xff"  # an array of 65,535
    return {
        "empty maps": head + b"\x9f" + (wide + b"\x80" * 65_535) * 15,
        "empty arrays": head + b"\x9f" + (wide + b"\x90" * 65_535) * 15,
        "deep arrays of maps": head + b"\xdc\xff\xff" + (b"\x91" * 60 + b"\x80") * 17_000,
        "nulls": head + b"\x9f" + (wide + b"\xc0" * 65_535) * 15,
        "small strings": head + b"\x9f" + (wide + b"\xa1a" * 65_535) * 7,
        "one wide map": head
        + b"\x91\xde\x20\x00"
        + b"".join(b"\xcd%b\xc0" % i.to_bytes(2, "big") for i in range(8192)),
        "maps of one key": head + b"\x9f" + (wide + b"\x81\xa0\xc0" * 65_535) * 5,
    }


def cost_s(data: bytes) -> float:
    """Least CPU time of five to decode and read a message, whatever comes of it."""
    times = []
    for _ in range(5):
        start = time.process_time()
        for message in Decoder().feed(data):
            if isinstance(message, RequestFrame):
                with contextlib.suppress(GpuschedError):
                    read_request(message.method, message.params)
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize("name", bombs())
def test_a_hostile_message_costs_no_more_than_a_full_legal_submit(name: str) -> None:
    words = [b"w%09d" % index for index in range(65_000)]
    legal = framing.encode_request(1, "submit", {"jobs": [{**JOB, "argv": words}]})
    assert len(legal) < REQUEST_BYTES_MAX
    assert len(bombs()[name]) <= REQUEST_BYTES_MAX
    assert cost_s(bombs()[name]) <= cost_s(legal)


# ------------------------------------------------------------------------------------- fuzz


def corpus() -> list[bytes]:
    """Honest messages of every method."""
    requests: list[tuple[str, dict[str, Any]]] = [
        ("hello", {}),
        ("submit", {"jobs": [JOB, {"argv": ["x"]}], "common": JOB, "submission_id": "abc"}),
        ("submit", {"jobs": [{**JOB, "rlimits": {"nofile": [1, 2]}, "vram_bytes": 2**34}]}),
        ("jobs", {"ids": [1, 2], "states": ["PENDING"], "limit": 5}),
        ("queue", {"after": 7}),
        ("job", {"job_id": 7}),
        ("cancel", {"job_ids": [1, 2, 3], "signal": 10, "reason": "x"}),
        ("update", {"job_ids": [1], "time_limit_s": -1, "hold": False}),
        ("wait", {"job_ids": [1], "timeout_s": 1.5}),
        ("watch", {"since": 3}),
        ("drain", {"gpu": "0", "reason": "fan"}),
    ]
    encoded = [
        framing.encode_request(i, method, params) for i, (method, params) in enumerate(requests)
    ]
    return [
        *encoded,
        framing.encode_notification("event", {"a": [1]}),
        framing.encode_response(3, {}),
    ]


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    """One honest message, damaged in one to six places."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 4))
        elif kind == 3:
            del data[at : at + rng.randint(1, 4)]
        elif kind == 4:
            data[at:at] = bytes(
                [rng.choice(b"\xc0\xc1\xc3\xc6\xc9\xca\xcb\xcf\xd6\xdb\xdd\xdf\x9f\x8f")]
            )
        else:
            other = rng.choice(seeds)
            data[at:] = other[rng.randrange(len(other)) :]
    return bytes(data)


def rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def fuzz(rounds: int, seed: int) -> dict[str, int]:
    """Feed mutated messages in pieces; every end is a message or a typed error."""
    rng, seeds, ends = random.Random(seed), corpus(), {"read": 0, "refused": 0, "malformed": 0}
    for _ in range(rounds):
        decoder, data = Decoder(), mutated(rng, seeds)
        cut = rng.randrange(len(data) + 1)
        for part in (data[:cut], data[cut:]):
            if decoder.failure is not None:
                break
            for message in decoder.feed(part):
                ends[_end_of(message)] += 1
    return ends


def _end_of(message: framing.Incoming) -> str:
    if isinstance(message, Malformed):
        assert isinstance(message.error, GpuschedError)
        return "malformed"
    if isinstance(message, RequestFrame):
        try:
            read_request(message.method, message.params)
        except GpuschedError as error:
            framing.encode_error(message.msgid, error)
            return "refused" if error.code in ("invalid", "too_large") else "wrong code"
    return "read"


def check_fuzz(rounds: int) -> None:
    fuzz(2_000, seed=1)
    before = rss_bytes()
    ends = fuzz(rounds, seed=2)
    assert all(count > rounds // 50 for count in ends.values()), ends
    assert rss_bytes() - before < 50 * 2**20


def test_connections_that_break_inside_a_message_leave_no_memory_behind() -> None:
    half = b"\x94\x00\x07\xa6submit\x91\x92" + b"\xda\x20\x00" + b"x" * 8192 + b"\x92\xc0"
    before = rss_bytes()
    for end in (b"", b"\xc1"):
        for _ in range(4_000):
            Decoder().feed(half + end)
    assert rss_bytes() - before < 10 * 2**20  # 60 MiB and more with msgpack below 1.2


@pytest.mark.parametrize(
    "data",
    [
        framing.encode_request(1, "hello", {}),
        framing.encode_request(1, "hello", {})[:-1],
        msgpack.packb([0, 1, "hello", [1, 2]]),
        msgpack.packb([2, 7, []]),
        msgpack.packb([3, 1]),
        b"\xc1",
        b"\x91" * 100,
    ],
)
def test_a_closed_connection_leaves_nothing_to_the_garbage_collector(data: bytes) -> None:
    """A decoder has 28 KiB, and thousands of connections come between two full collections."""
    gc.collect()
    gc.disable()
    try:
        messages = Decoder().feed(data)
        errors = [message.error for message in messages if isinstance(message, Malformed)]
        del messages, errors
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_mutated_messages_give_typed_errors_and_no_memory_growth() -> None:
    check_fuzz(20_000)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_million_mutated_messages_give_typed_errors_and_no_memory_growth() -> None:
    check_fuzz(1_000_000)


def test_limits_are_the_contract_s() -> None:
    assert (limits.REQUEST_BYTES_MAX, limits.PAYLOAD_BYTES_MAX) == (2**20, 768 * 1024)
    assert (limits.NESTING_MAX, limits.CONTAINERS_MAX) == (64, 30_000)
    assert limits.RESPONSE_JOBS_MAX == 1_000
