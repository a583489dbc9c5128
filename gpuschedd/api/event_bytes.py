"""Events as they travel: of each there are few faces, and many watchers who see the same one."""

from __future__ import annotations

from enum import Enum, auto

from gpusched_client.terms import EventKind
from gpusched_client.wire import framing
from gpusched_client.wire.job_messages import EVENT_METHOD
from gpusched_client.wire.job_messages import Event as WireEvent
from gpuschedd.api import views
from gpuschedd.api.limits import WATCH_QUEUE_MAX
from gpuschedd.store.records import Event


class Face(Enum):
    """What somebody may see of an event."""

    WHOLE = auto()  # its owner and admins
    OTHERS = auto()  # all but why
    NAMELESS = auto()  # where the host is private


class EventBytes:
    """Encodes each face of an event once: an event never changes."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Face], bytes] = {}

    def of(self, number: int, event: Event, face: Face) -> bytes:
        """The notification."""
        if event.kind == EventKind.EVENTS_DROPPED:  # each watcher's own
            return _encoded(number, event)
        known = self._known.get((number, face))
        if known is None:
            if len(self._known) >= WATCH_QUEUE_MAX:
                self._known.clear()
            shown = event
            if face is not Face.WHOLE:
                shown = views.event_of_another(event, hides_name=face is Face.NAMELESS)
            known = self._known[number, face] = _encoded(number, shown)
        return known


def _encoded(number: int, event: Event) -> bytes:
    shown = WireEvent(
        event_id=number,
        at_s=event.at_s,
        kind=event.kind,
        job_id=event.job_id,
        uid=event.uid,
        gpu_uuid=event.data.get("gpu"),
        text=views.event_text(event),
        data=dict(event.data),
    )
    return framing.encode_notification(EVENT_METHOD, shown.to_wire())
