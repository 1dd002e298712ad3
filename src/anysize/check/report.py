"""A check's report for people and for programs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from anysize.check.findings import FIXES, Finding, Report
from anysize.data.shapes import Objects
from anysize.wording import count_of

MOST_SHOWN = 10
"""Files of a kind that the console names; the JSON file names all."""


def describe_report(report: Report) -> str:
    """What the console says, and which files it names: the first of each kind."""
    folder = report.folder
    sizes = report.sizes
    lines = [folder.description, *folder.notes]
    if sizes:
        lines.append(
            f"{_count_of(len(sizes), 'image')} from {sizes[0]} to {sizes[-1]} (height x width), "
            f"{_count_of(len(set(sizes)), 'size')}"
        )
    if report.brightest is not None:
        white = report.config.pixels.white
        lines.append(
            f"Images of 16 bits: the brightest pixel is {report.brightest}, "
            f"{report.brightest / white:.1%} of pixels.white ({white})"
        )
    if report.objects is not None:
        lines.append(_describe_objects(report.objects))
    lines += _describe_splits(report)
    for severity in ("fault", "warning"):
        by_kind: dict[str, list[Finding]] = defaultdict(list)
        for finding in report.findings:
            if finding.severity == severity:
                by_kind[finding.kind].append(finding)
        for kind, findings in by_kind.items():
            lines += ["", f"{kind}: {_count_of(len(findings), severity)}"]
            lines += [f"  {' '.join(f.message.split())}" for f in findings[:MOST_SHOWN]]
            if len(findings) > MOST_SHOWN:
                lines.append(
                    f"  and {len(findings) - MOST_SHOWN} more; --json F writes all of them"
                )
            lines.append(f"  What to do: {FIXES[kind]}.")
    totals = Counter(f.severity for f in report.findings)
    files = len({f.path for f in report.findings if f.severity == "fault"})
    of_files = f" in {count_of(files, 'file')}" if files else ""
    lines += [
        "",
        f"{_count_of(totals['fault'], 'fault')}{of_files}, "
        f"{_count_of(totals['warning'], 'warning')}.",
    ]
    return "\n".join(lines)


def _count_of(number: int, what: str) -> str:
    return count_of(number, what) if number else f"no {what}s"


def _describe_objects(objects: Objects) -> str:
    said = f"Objects: {objects.drawn} drawn"
    if objects.cut:
        said += f", {objects.cut} of them cut at the border of their image"
    if objects.left_out:
        left_out = count_of(len(objects.left_out), "object or part", "objects or parts")
        said += f"; {left_out} left out"
    return said


def _describe_splits(report: Report) -> Iterator[str]:
    names, is_joints = report.folder.classes.names, report.folder.kind == "joints"
    num_images = Counter(report.split.values())
    for where, counts in report.class_pixels.items():
        if not counts.num_pixels:
            yield f"{where}: {count_of(num_images[where], 'image')}; no labels read"
            continue
        of, what = ("people", "joint") if is_joints else ("pixels", "class")
        images = count_of(num_images[where], "image")
        yield f"{where}: {images}; share of their {of}, images with the {what}:"
        width = max(len(name) for name in (*names, "ignored"))
        for name, pixels, holders in zip(
            names, counts.labels.tolist(), counts.images.tolist(), strict=False
        ):
            share = f"{pixels / counts.num_pixels:.1%}"
            yield f"  {name:<{width}}  {share:>6}  {holders} of {num_images[where]}"
        if ignored := int(counts.labels[-1]):
            yield f"  {'ignored':<{width}}  {f'{ignored / counts.num_labels:.1%}':>6}"


def report_json(report: Report) -> dict[str, Any]:
    """The whole report as plain values; docs/check.md describes the keys."""
    folder, sizes = report.folder, report.sizes
    by_severity = Counter(f.severity for f in report.findings)
    num_images = Counter(report.split.values())
    return {
        "format": "anysize check 1",
        "data": str(folder.root),
        "layout": folder.layout,
        "description": folder.description,
        "passed": report.passed,
        "num_images": len(sizes),
        "num_faults": by_severity["fault"],
        "num_warnings": by_severity["warning"],
        "counts": {
            severity: dict(Counter(f.kind for f in report.findings if f.severity == severity))
            for severity in ("fault", "warning")
        },
        "findings": [
            {
                "kind": f.kind,
                "severity": f.severity,
                "file": str(f.path),
                "message": f.message,
                "found": [list(entry) for entry in f.found],
            }
            for f in report.findings
        ],
        "fixes": {
            kind: text
            for kind, text in FIXES.items()
            if any(f.kind == kind for f in report.findings)
        },
        "brightest_of_16_bits": report.brightest,
        "objects": None
        if report.objects is None
        else {
            "drawn": report.objects.drawn,
            "cut": report.objects.cut,
            "left_out": dict(Counter(entry.why for entry in report.objects.left_out)),
        },
        "classes": list(folder.classes.names),
        "splits": {
            where: {
                "num_images": num_images[where],
                "class_pixels": dict(
                    zip(folder.classes.names, counts.labels.tolist()[:-1], strict=True)
                ),
                "class_images": dict(
                    zip(folder.classes.names, counts.images.tolist(), strict=True)
                ),
                "ignored_pixels": int(counts.labels[-1]),
            }
            for where, counts in report.class_pixels.items()
        },
        "sizes": {
            "num_different": len(set(sizes)),
            "smallest": list(sizes[0]) if sizes else None,
            "median": list(sizes[len(sizes) // 2]) if sizes else None,
            "largest": list(sizes[-1]) if sizes else None,
            "megapixels": sum(s.pixels for s in sizes) / 1e6,
        },
    }
