"""The pages for Prometheus of all replicas as one page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$")


def merged_pages(pages: Sequence[tuple[str, str]], loads: Mapping[str, int]) -> str:
    """Return one page. Each sample gets a label `replica`, and each family its comments once.

    loads: the open requests of each replica, as the router counts them.
    """
    comments: dict[str, list[str]] = {}  # of each family, in order
    samples: dict[str, list[str]] = {}
    for replica, page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                known = comments.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif found := SAMPLE.match(line):
                name, labels, value = found.groups()
                labels = f'replica="{replica}"' + (f",{labels}" if labels else "")
                samples.setdefault(family, []).append(f"{name}{{{labels}}} {value}")
    lines = [line for name in samples for line in [*comments.get(name, ()), *samples[name]]]
    lines += ["# TYPE ladder:router_open_requests gauge"]
    lines += [f'ladder:router_open_requests{{replica="{name}"}} {n}' for name, n in loads.items()]
    return "\n".join(lines) + "\n"
