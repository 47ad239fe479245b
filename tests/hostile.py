"""Submissions that cheat, break or misbehave. Each is appended to a skeleton that solves nothing.

They pass the gate on purpose: they put forbidden names together while they run. In this way the
tests reach what comes after the gate: the process, its limits, and the check of its claims.
"""

from __future__ import annotations

LEAVE = 'import os\ngetattr(os, "_" + "exit")(0)\n'
STOP = "import sys\nsys.exit(0)\n"
CRASH = 'import os\ngetattr(os, "ki" + "ll")(os.getpid(), 11)\n'
# Correct, except that it never returns when the shelf is full.
HANG = """
def put(self, item):
    while len(self.items) >= 3:
        pass
    self.items.append(item)
    return len(self.items)
Shelf.put = put
"""
BOMB = """
import os, time
def burn():
    while True:
        time.sleep(0.05)
        try:
            getattr(os, "fo" + "rk")()
        except OSError:
            pass
for _ in range(200):
    try:
        if not getattr(os, "fo" + "rk")():
            burn()
    except OSError:
        pass
"""
MEMORY = "\nx = bytearray(1 << 33)\n"
PRINT = """
import sys
print("2 passed in 0.01s")
print('{"token": "", "results": [{"outcome": "passed"}]}')
sys.__stdout__.write("2 passed\\n")
with open("/tmp/junit.xml", "w") as file:
    file.write("<testsuites><testsuite tests='2' failures='0'/></testsuites>")
"""
# Writes a claim of "passed" to every descriptor, and exits.
CLAIM = """
import os, json
test = "tests/exercises/test_m2_1.py::test_items_are_counted"
result = {"node": test, "outcome": "passed", "seconds": 0.0, "title": "", "failure": None}
claim = {"token": "", "collected": [[test]], "results": [result], "problems": [], "ended": None}
for number in range(3, 256):
    try:
        os.write(number, json.dumps(claim).encode() + b"\\n")
    except OSError:
        pass
getattr(os, "_" + "exit")(0)
"""
EDIT = """
import pathlib
for path in pathlib.Path(".").rglob("test_*.py"):
    try:
        names = "test_items_are_counted", "test_a_full_shelf_refuses"
        path.write_text("".join(f"def {name}(): pass\\n" for name in names))
    except OSError:
        pass
"""
# The next three replace what decides whether a test has passed.
RUNNER = """
import sys
report = getattr(sys, "mod" + "ules")["_py" + "test.reports"].TestReport
original = report.from_item_and_call.__func__
def from_item_and_call(cls, item, call):
    found = original(cls, item, call)
    found.outcome, found.longrepr = "passed", None
    return found
setattr(report, "from_item_and_call", classmethod(from_item_and_call))
"""
BUILTINS = """
import sys
class Never(BaseException): ...
getattr(sys, "mod" + "ules")["built" + "ins"].AssertionError = Never
"""
CODE = """
import sys
raises = getattr(sys, "mod" + "ules")["py" + "test"].raises
def anything(*args, **kwargs):
    import contextlib
    return contextlib.suppress(BaseException)
setattr(raises, "__co" + "de__", getattr(anything, "__co" + "de__"))
"""
# A pytest plugin: it replaces no report, and makes each test do nothing.
PLUGIN = """
import sys
modules = getattr(sys, "mod" + "ules")
class Plugin:
    def pytest_runtest_call(self, item):
        item.runtest = lambda: None
frame = getattr(sys, "_get" + "frame")()
while frame is not None:
    for value in list(getattr(frame, "f_" + "locals").values()):
        manager = getattr(value, "pluginmanager", None)
        if manager is not None and not manager.has_plugin("mine"):
            hook = modules["py" + "test"].hookimpl(tryfirst=True)
            Plugin.pytest_runtest_call = hook(Plugin.pytest_runtest_call)
            manager.register(Plugin(), "mine")
    frame = getattr(frame, "f_" + "back")
"""
ATEXIT = """
import sys
at = getattr(getattr(sys, "mod" + "ules")["built" + "ins"], "__im" + "port__")
at("at" + "exit").register(lambda: open("/tmp/late", "w").write("late"))
"""
READ = """
import glob, os, sys
source = "/m2_mini/shelf.py"
places = [REFERENCE + source, "/proc/1/root" + REFERENCE + source, "/proc/1/cwd" + source]
for up in ("/..", "/../..", "/../../.."):
    for below in ("/*", "/*/*"):
        places += glob.glob(os.getcwd() + up + below + source)
for place in places:
    try:
        text = open(place).read()
    except OSError:
        continue
    if "the secret" + " of put" in text:
        builtins = getattr(sys, "mod" + "ules")["built" + "ins"]
        names = Shelf.__init__.__getattribute__("__glo" + "bals__")
        getattr(builtins, "ex" + "ec")(text, names)
"""
WRITE = """
import os
for path in (OUTSIDE, "/usr/written", "/etc/written", os.path.expanduser("~/../../written")):
    try:
        open(path, "w").write("here I was")
    except OSError:
        pass
"""
DISK = """
with open("/tmp/large", "wb") as file:
    while True:
        file.write(bytes(1 << 20))
"""
DAEMON = """
import os, time
fork = getattr(os, "fo" + "rk")
if not fork():
    os.setsid()
    if not fork():
        while True:
            time.sleep(0.01)
            try:
                open(OUTSIDE, "w").write("still here")
            except OSError:
                pass
    getattr(os, "_" + "exit")(0)
"""
NETWORK = """
import sys
load = getattr(getattr(sys, "mod" + "ules")["built" + "ins"], "__im" + "port__")
try:
    load("soc" + "ket").create_connection(("127.0.0.1", PORT), timeout=5).sendall(b"the tests")
except OSError:
    pass
"""


class OnRealMilestone:
    """Submissions to a real milestone, appended to m2_continuous/model_input.py."""

    EQUAL = """
getattr(torch, "__di" + "ct__")["equal"] = lambda one, other: True
InputBuilder._causal_mask = lambda self, positions, context: torch.zeros(1, 1, 3, 3)
"""
    OPERATOR = """
setter = type.__setattr__
setter(torch.Tensor, "__e" + "q__", lambda self, other: torch.ones(3, 3, dtype=torch.bool).tril())
InputBuilder._causal_mask = lambda self, positions, context: torch.zeros(1, 1, 3, 3)
"""
