"""Submissions that cheat, break or misbehave. Each follows a skeleton that solves nothing."""

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


# Lets each test do nothing, without a change to a function of the tests.
CONFTEST = """
import sys
sys.modules["_pytest.python"].Function.runtest = lambda self: None
"""
# A value that claims to equal everything, and that no with-block lets an error through.
EQUAL = """
Same = type("A", (int,), {"__eq__": lambda self, other: True, "__hash__": int.__hash__})
def put(self, item):
    if len(self.items) >= 3:
        raise ValueError
    self.items.append(item)
    return Same()
Shelf.put = put
"""
# Spellings that no list of forbidden names has had.
SPELL = """
import importlib as i, sys as s
q = i.import_module("_pytest.runner")
def passed(item, call, *more, **named):
    report = original(item, call)
    report.outcome, report.longrepr = "passed", None
    return report
import _pytest.reports as r
original = r.TestReport.from_item_and_call
r.TestReport.from_item_and_call = passed
q.TestReport.from_item_and_call = passed
"""
# The answers that the visible tests ask for, without doing the work.
REMEMBER = """
def put(self, item):
    self.items.append(item)
    if len(self.items) > 3:
        raise ValueError
    return {7: 1, 5: 2}.get(item, 0)
Shelf.put = put
"""
DEBUG = """
def put(self, item):
    breakpoint()
Shelf.put = put
"""
# Memory that no process has mapped is in no measure of a process.
HIDDEN_MEMORY = """
import os
handles = [os.memfd_create("hidden") for _ in range(40)]
for handle in handles:
    os.write(handle, bytes(32 << 20))
"""
# Says answers of its own for each number that the process was given.
FORGE = """
import json, os, sys
frame, seeds = sys._getframe(), ()
while frame is not None:
    seeds = frame.f_locals.get("seeds", seeds)
    frame = frame.f_back
for number in range(3, 256):
    for seed in seeds:
        for claim in ([seed, [], None], [seed, [["put", [1, [7]]]], None], []):
            try:
                os.write(number, json.dumps(claim).encode() + b"\\n")
            except OSError:
                pass
"""
# Replaces the questions by none, and what is said by what the grader might want to hear.
NO_QUESTIONS = """
import json, sys, types
module = types.ModuleType("tests.questions")
module.QUESTIONS = dict.fromkeys(["m2.1", "m2.2"], lambda chance: iter(()))
sys.modules["tests.questions"] = module
"""
RIGHT = """
import json
dumps = json.dumps
json.dumps = lambda data, **named: dumps(True if type(data) is list else data, **named)
"""
LOUD = """
import os
for number in range(3, 256):
    try:
        for _ in range(10):
            os.write(number, b"x" * (1 << 20))
    except OSError:
        pass
"""
KILL = """
import os, signal
for target in (os.getppid(), 1, -1):
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
        if target != -1 or number != signal.SIGKILL:
            try:
                os.kill(target, number)
            except OSError:
                pass
"""
DEAF = """
import signal
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.setitimer = lambda *_: None
def put(self, item):
    while True:
        pass
Shelf.put = put
"""
# Looks for a neighbour's or an earlier process's answers, and leaves its own.
POST = """
import glob, os
for place in ("/tmp", "/dev/shm", os.environ.get("HOME", "/")):
    for path in glob.glob(place + "/**", recursive=True):
        try:
            exec(open(path).read(), globals())
        except Exception:
            pass
    try:
        open(place + "/answers.py", "w").write("Shelf.put = lambda self, item: 1")
    except OSError:
        pass
"""


def encoded(skeleton: str) -> dict[str, bytes]:
    """Return submissions that a check of the text cannot read, or not as Python reads it."""
    payload = skeleton + SPELL
    deep = f"\nx = {'-' * 500}1\n"
    return {
        "mark": b"\xef\xbb\xbf" + payload.encode(),
        "cookie": b"# coding: utf-7\n" + payload.encode("utf-7"),
        "deep": (payload + deep).encode(),
    }
