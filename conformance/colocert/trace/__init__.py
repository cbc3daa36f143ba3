"""Traces: the event schema, files of events, and the byte ledger. Nothing here judges anything."""

from colocert.trace.events import POISON, SCHEMA_VERSION, AnyEvent, Event, schema
from colocert.trace.files import TraceError, TraceWriter, read_trace
from colocert.trace.ledger import Allocation, Ledger

__all__ = [
    "POISON",
    "SCHEMA_VERSION",
    "Allocation",
    "AnyEvent",
    "Event",
    "Ledger",
    "TraceError",
    "TraceWriter",
    "read_trace",
    "schema",
]
