"""`scripts/bench [--state NAME] [--rounds N] [--check] [--json FILE] [--markdown FILE]`."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers, states
from benchmarks.peers import Ckpt, Dcp1, Memcpy, Peer, TorchSave

STATES = {"gpt2": states.gpt2, "small": states.small}
# (state, measure, ckpt's value over this peer's, at most)
BARS = (
    ("gpt2", "save", TorchSave.name, 0.7),
    ("small", "save", TorchSave.name, 0.7),
    ("small", "save", Dcp1.name, 0.2),
    ("gpt2", "load", TorchSave.name, 1.0),
    ("small", "load", TorchSave.name, 1.0),
    ("gpt2", "stall", Memcpy.name, 2.0),
)


def measure(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Every peer on one state, `rounds` times interleaved, so that what else the machine does falls on all alike."""
    state = STATES[name]()
    found: dict[str, dict[str, list[float]]] = {}
    made = [kind(folder / f"{number}", state) for number, kind in enumerate(peers.PEERS)]
    try:
        for round_number in range(rounds + 1):
            for peer in made:
                values = one(peer)
                # The first round warms caches and buffers; it is not counted.
                for key, value in values.items() if round_number else ():
                    found.setdefault(peer.name, {}).setdefault(key, []).append(value)
            print(f"{name}: round {round_number} of {rounds}", file=sys.stderr, flush=True)
    finally:
        for peer in made:
            peer.close()
    return {"state": name, "tensors": len(states.flat(state)), "bytes": state.bytes, "seconds": found}


def one(peer: Peer) -> dict[str, float]:
    values = {"save": peer.save()}
    loaded = peer.load()
    if loaded is not None:
        values["load"] = loaded
    stalled = peer.stall()
    if stalled is not None:
        values["stall"], values["async to durable"] = stalled
    if isinstance(peer, Memcpy):
        values["stall"] = values["save"]
    return values


def ratios(result: dict[str, Any], key: str, peer: str) -> list[float]:
    """ckpt's time over the peer's, round by round."""
    own = result["seconds"][Ckpt.name].get(key, [])
    other = result["seconds"].get(peer, {}).get(key, [])
    return [a / b for a, b in zip(own, other, strict=False)]


def table(result: dict[str, Any]) -> str:
    lines = [
        f"### {result['state']}: {result['tensors']:,} tensors, {result['bytes'] / 1e9:.3f} GB",
        "",
        "| | save to durable | load, warm | async: caller waits | async: to durable |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, values in result["seconds"].items():
        cells = []
        for key in ("save", "load", "stall", "async to durable"):
            if key not in values:
                cells.append("-")
                continue
            text = f"{statistics.median(values[key]):.3f} s"
            if name != Ckpt.name and (found := ratios(result, key, name)):
                text += f" (ckpt {statistics.median(found):.2f}x)"
            cells.append(text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def check(results: list[dict[str, Any]]) -> bool:
    met = True
    for state, key, peer, bar in BARS:
        for result in results:
            if result["state"] == state and (found := ratios(result, key, peer)):
                value = statistics.median(found)
                met &= value <= bar
                verdict = "met" if value <= bar else "MISSED"
                print(f"{verdict:6}  {state} {key}: {value:.2f}x of {peer}, bar {bar}x ({len(found)} pairs)")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--state", choices=sorted(STATES), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    peers.quiet()
    folder = Path(tempfile.mkdtemp(prefix="ckpt-bench-", dir=options.folder))
    try:
        results = [measure(name, options.rounds, folder / name) for name in options.state or STATES]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    machine = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, {platform.system()}"
    text = "\n\n".join([f"Medians of {options.rounds} interleaved rounds; {machine}.", *map(table, results)])
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    return 0 if check(results) or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
