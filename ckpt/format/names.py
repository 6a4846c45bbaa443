"""Names and limits of format v1: how steps, files and tensors are spelled, and how large anything may be."""

from __future__ import annotations

import re

FORMAT_VERSION = 1

MANIFEST = "manifest.json"
PINS = "pins"
LOCK = ".lock"
TMP_PREFIX = ".tmp-"
TRASH_PREFIX = ".trash-"

ALIGN = 4096  # headers are padded to it, so that the data of a file starts on a block of the device
BLOCK = 1 << 20  # bytes covered by one digest of a data file
MAX_BLOCK = 1 << 30  # a reader holds one block

MAX_HEADER = 100_000_000  # the limit of the safetensors package
MAX_MANIFEST = 512 << 20
MAX_INDEX = 512 << 20
MAX_TENSORS = 1_000_000
MAX_FILES = 1_000_000
MAX_DIMS = 64
MAX_NAME = 64 << 10  # bytes of one tensor name
MAX_DEPTH = 100  # nesting of a value: each level takes several of the 1000 frames Python allows
PART_DEPTH = 10  # levels that a part adds around the values of its object: groups, options, ...
MAX_WORLD = 1 << 24  # ranks
MAX_PIN = 4 << 10
MAX_MONITOR = 1 << 10  # bytes of the metric that tells which step is best
MAX_STEP = 1 << 62
MAX_INT = (1 << 53) - 1  # larger integers are spelled by a tag, so that every JSON reader gets them right

_DEBRIS = re.compile(
    r"\.(tmp|trash)-step-[0-9]{8,20}(-[0-9A-Za-z._-]{1,80})?\Z"  # attempts and removals
    r"|\.(tmp|trash)-.+-[0-9a-f]{16}\Z"  # drafts of small files, removals of renamed folders
)
_STEP = re.compile(r"step-([0-9]{8,20})\Z")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_PART = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_ID = re.compile(r"[0-9a-f]{32}\Z")
_INTEGER = re.compile(r"-?[0-9]{1,1000}\Z")
_ESCAPED = re.compile("%(?:u([0-9A-F]{4})|([0-9A-F]{2}))")
_SURROGATE = re.compile("[\ud800-\udfff]")
RESERVED_PARTS = frozenset({"rng", "step"})


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_step_name(name: str) -> int | None:
    """The step a folder's name says, or None. The manifest inside is the truth; the name is for people."""
    match = _STEP.match(name)
    return int(match.group(1)) if match else None


def index_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def data_name(rank: int, number: int = 0) -> str:
    return f"rank-{rank:05d}.safetensors" if number == 0 else f"rank-{rank:05d}-{number}.safetensors"


def is_debris(name: str) -> bool:
    """True for a name that only a dead attempt or removal of ours leaves; others that start with a dot are foreign."""
    return _DEBRIS.match(name) is not None


def is_file_name(name: object) -> bool:
    """True for a name a manifest may list: one plain segment, so that no listed file can lie outside the step."""
    return isinstance(name, str) and _FILE.match(name) is not None


def is_part_name(name: object) -> bool:
    return isinstance(name, str) and _PART.match(name) is not None


def is_part_path(name: object) -> bool:
    """True for a registered name, or one of an object inside a registered container: "nets/generator"."""
    if not isinstance(name, str) or len(name) > MAX_NAME:
        return False
    first = name.partition("/")[0]
    return is_part_name(first) and first not in RESERVED_PARTS


def is_monitor(name: object) -> bool:
    """True for the name of a metric that a policy can hold."""
    return isinstance(name, str) and 0 < len(name.encode("utf-8", "surrogatepass")) <= MAX_MONITOR


def is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.match(value) is not None


def escape(key: object) -> str:
    """One path segment for a container's key: a reversible spelling without "/".

    An int is its decimal digits; a str is itself with "%" and "/" percent-encoded, and its first character encoded too
    when it reads like an int, so that 0 and "0" stay apart; "" is "%-"; a lone surrogate is "%u" and four hex digits.
    Any other key is refused by the caller.
    """
    if isinstance(key, int):
        if abs(key) >= 10**1000:
            raise TypeError("a path segment is a str or an int of at most 1000 digits")
        return str(int(key))
    if not isinstance(key, str):
        raise TypeError(f"a path segment is a str or an int, not {type(key).__name__}")
    if key == "":
        return "%-"
    if "%" in key or "/" in key:
        key = key.replace("%", "%25").replace("/", "%2F")
    if _INTEGER.match(key):
        key = f"%{ord(key[0]):02X}{key[1:]}"
    if not key.isascii():
        key = _SURROGATE.sub(lambda match: f"%u{ord(match.group()):04X}", key)
    return key


def unescape(segment: str) -> str | int:
    """The key that `escape` spelled as `segment`."""
    if "%" not in segment:
        return int(segment) if _INTEGER.match(segment) else segment
    if segment == "%-":
        return ""
    return _ESCAPED.sub(lambda match: chr(int(match.group(1) or match.group(2), 16)), segment)
