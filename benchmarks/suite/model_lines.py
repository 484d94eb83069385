"""Rows of whole models in words: flashgen beside each peer, the furthest behind first; losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Row = dict[str, str]
OURS = "flashgen"
GIB = 1 << 30


@dataclass(frozen=True)
class Pair:
    """flashgen and one peer on one problem; ``ratio`` above 1: flashgen's step is shorter."""

    ours: Row
    peer: Row

    @property
    def ratio(self) -> float:
        return float(self.peer["ms_p50"]) / float(self.ours["ms_p50"])


def pairs(rows: Sequence[Row]) -> list[Pair]:
    """Every timed pair, that in which a peer is furthest ahead first."""
    timed = [row for row in rows if row["ms_p50"]]
    timed_pairs = [
        Pair(ours, peer)
        for ours in timed
        for peer in timed
        if ours["backend"] == OURS != peer["backend"] and problem(ours) == problem(peer)
    ]
    return sorted(timed_pairs, key=lambda pair: pair.ratio)


def problem(row: Row) -> str:
    dropped = f" dropout {row['dropout']}" if float(row["dropout"]) else ""
    return f"{row['mode']} {row['model']}{dropped} B{row['batch']} N{row['positions']}"


def compared(rows: Sequence[Row]) -> list[str]:
    """Each pair, then flashgen's rows that have no peer."""
    timed_pairs = pairs(rows)
    lines = [
        f"{_timed(pair.ours)}   {pair.ratio:.2f} x {_who(pair.peer)}: {_figures(pair.peer)}"
        for pair in timed_pairs
    ]
    with_peer = {problem(pair.ours) for pair in timed_pairs}
    alone = [
        row
        for row in rows
        if row["backend"] == OURS and row["ms_p50"] and problem(row) not in with_peer
    ]
    return lines + [f"{_timed(row)}   no peer" for row in alone]


def not_timed(rows: Sequence[Row]) -> list[str]:
    """Each reason for which a backend has no times, with the problems that it concerns."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            key = (row["status"], _who(row), row["note"])
            reasons.setdefault(key, []).append(problem(row))
    return [
        f"{who}: {status}, {note}   ({'; '.join(names)})"
        for (status, who, note), names in sorted(
            reasons.items(), key=lambda it: it[0][0] != "wrong"
        )
    ]


def losses(rows: Sequence[Row]) -> list[str]:
    """Six losses of each training; the trainings of one problem follow each other."""
    trained = [row for row in rows if row["losses"]]
    lines = []
    for name in dict.fromkeys(map(problem, trained)):
        for row in trained:
            if problem(row) == name:
                curve = row["losses"].split()
                some = [curve[index * (len(curve) - 1) // 5] for index in range(6)]
                bound = "   " + (row["note"] if row["allowed"] else "the reference")
                shown = " ".join(f"{float(loss):8.4f}" for loss in some)
                lines.append(f"{name:<44} {row['backend']:<18} {shown}{bound}")
    return lines


def table(rows: Sequence[Row]) -> list[str]:
    """The pairs as a table for a page; no line where nothing was timed."""
    timed_pairs = pairs(rows)
    if not timed_pairs:
        return []
    head = (
        "| model | tokens per second | peak memory, GiB | peer | its tokens per second | its peak |"
    )
    return [
        f"{head} times as fast |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {problem(pair.ours)} | {_cells(pair.ours)} | {_who(pair.peer)} "
            f"| {_cells(pair.peer)} | {pair.ratio:.2f} |"
            for pair in timed_pairs
        ),
    ]


def _who(row: Row) -> str:
    return f"{row['backend']} ({row['library']})"


def _timed(row: Row) -> str:
    return f"{problem(row):<44} {_figures(row)}"


def _figures(row: Row) -> str:
    peak = f", {_peak(row)} GiB" if row["peak_bytes"] else ""
    return f"{float(row['ms_p50']):.2f} ms, {float(row['tokens_per_s']):.0f} tokens/s{peak}"


def _cells(row: Row) -> str:
    return f"{float(row['tokens_per_s']):.0f} | {_peak(row)}"


def _peak(row: Row) -> str:
    return f"{float(row['peak_bytes']) / GIB:.1f}" if row["peak_bytes"] else ""
