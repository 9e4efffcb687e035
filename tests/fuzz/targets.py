"""All that is fuzzed. A reader of another room joins by one more `Target` in one of these tuples."""

from tests.fuzz.record_targets import RECORD_TARGETS
from tests.fuzz.wire_targets import WIRE_TARGETS

TARGETS = (*WIRE_TARGETS, *RECORD_TARGETS)
