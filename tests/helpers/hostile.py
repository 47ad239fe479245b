"""Submissions that cheat, break or misbehave.

Each follows a skeleton that solves nothing, and `RULES`.
"""

from __future__ import annotations

RULES = """
import ctypes, glob, json, mmap, os, pathlib, re, signal, socket, sys, time, types
class Held(Exception):
    "The submission has reached its aim."
def tell(data):
    "Write to each file that the process has, but not to its standard streams."
    for number in range(3, 256):
        try:
            os.write(number, data)
        except OSError:
            pass
libc = ctypes.CDLL(None, use_errno=True)
"""
LEAVE = "os._exit(0)\n"
STOP = "sys.exit(0)\n"
CRASH = "os.kill(os.getpid(), 11)\n"
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
def burn():
    while True:
        time.sleep(0.05)
        try:
            os.fork()
        except OSError:
            pass
for _ in range(200):
    try:
        if not os.fork():
            burn()
    except OSError:
        pass
"""
MEMORY = "\nx = bytearray(1 << 33)\n"
# Writes a claim of "passed" to every descriptor, and exits.
CLAIM = """
test = "tests/exercises/test_m2_1.py::test_items_are_counted"
result = {"node": test, "outcome": "passed", "seconds": 0.0, "title": "", "failure": None}
claim = {"token": "", "collected": [[test]], "results": [result], "problems": [], "ended": None}
tell(json.dumps(claim).encode() + b"\\n")
os._exit(0)
"""
EDIT = """
for path in pathlib.Path(".").rglob("test_*.py"):
    try:
        names = "test_items_are_counted", "test_a_full_shelf_refuses"
        path.write_text("".join(f"def {name}(): pass\\n" for name in names))
    except OSError:
        pass
"""
READ = """
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
        exec(text, globals())
"""
WRITE = """
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
if not os.fork():
    os.setsid()
    if not os.fork():
        while True:
            time.sleep(0.01)
            try:
                open(OUTSIDE, "w").write("still here")
            except OSError:
                pass
    os._exit(0)
"""
NETWORK = """
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=5).sendall(b"the tests")
except OSError:
    pass
"""
# Lets each test do nothing, without a change to a function of the tests.
CONFTEST = """
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
# Replaces what decides whether a test has passed.
REPORT = """
import _pytest.reports, _pytest.runner
original = _pytest.reports.TestReport.from_item_and_call
def passed(item, call, *more, **named):
    report = original(item, call)
    report.outcome, report.longrepr = "passed", None
    return report
_pytest.reports.TestReport.from_item_and_call = passed
_pytest.runner.TestReport.from_item_and_call = passed
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
handles = [os.memfd_create("hidden") for _ in range(40)]
for handle in handles:
    os.write(handle, bytes(32 << 20))
"""
# Says answers of its own for each number that the process was given.
FORGE = """
frame, seeds = sys._getframe(), ()
while frame is not None:
    seeds = frame.f_locals.get("seeds", seeds)
    frame = frame.f_back
for seed in seeds:
    for claim in ([seed, [], None], [seed, [["items", "put", [1, [7]]]], None], []):
        tell(json.dumps(claim).encode() + b"\\n")
"""
# Replaces the questions by none, and what is said by what the grader might want to hear.
NO_QUESTIONS = """
module = types.ModuleType("tests.questions")
module.QUESTIONS = dict.fromkeys(["m2.1", "m2.2"], (lambda chance: iter(()), 12))
sys.modules["tests.questions"] = module
"""
RIGHT = """
dumps = json.dumps
json.dumps = lambda data, **named: dumps(True if type(data) is list else data, **named)
"""
LOUD = """
for _ in range(10):
    tell(b"x" * (1 << 20))
"""
KILL = """
for target in (os.getppid(), 1, -1):
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
        if target != -1 or number != signal.SIGKILL:
            try:
                os.kill(target, number)
            except OSError:
                pass
"""
DEAF = """
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.setitimer = lambda *_: None
def put(self, item):
    while True:
        pass
Shelf.put = put
"""
