"""Submissions that hold memory which no process shows, or look for what is not theirs.

Each follows a skeleton that solves nothing, and the names of `hostile.RULES`. It raises `Held` at
its import if it has what it should not have, so that its failures show the name of this class.
"""

from __future__ import annotations

# Semaphores and messages of System V are in the kernel, and in no process.
SEMAPHORES = """
for count in range(100):
    if libc.semget(0, 32000, 0o600) < 0:
        break
else:
    raise Held("3,200,000 semaphores")
"""
MESSAGES = """
for count in range(100):
    queue = libc.msgget(0, 0o600)
    if queue < 0 or libc.msgsnd(queue, ctypes.create_string_buffer(8008), 8000, 0o4000):
        break
else:
    raise Held("800 KB of messages")
"""
# Shared memory stays when a process gives up its view of it, and no process shows it then.
views = """
memory = []
for part in range(75):
    view = mmap.mmap(FILE, 16 << 20)
    view[:] = bytes(16 << 20)
    view.madvise(mmap.MADV_DONTNEED)
    memory.append(view)
raise Held("1.2 GB of shared memory")
"""
SHARED = views.replace("FILE", "-1")
ZERO = views.replace("FILE", 'os.open("/dev/zero", os.O_RDWR)')
# The page tables of memory that is only read: 4 KB for each 2 MB.
PAGE_TABLES = """
pages = mmap.mmap(-1, 600 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000,
                  prot=mmap.PROT_READ)
for place in range(0, 600 << 30, 2 << 20):
    pages[place]
time.sleep(1)
raise Held("1.2 GB of page tables")
"""
# In a user namespace of its own, a process may mount a file system without a limit.
NAMESPACE = """
user = os.getuid()
if not os.fork():  # only a process with one thread may make one
    made = libc.unshare(0x10000000 | 0x20000) or libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b"")
    os._exit(bool(made))
if os.wait()[1] == 0:
    raise Held("a file system without a limit")
"""
CLONE = """
stack = ctypes.create_string_buffer(1 << 16)
work = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)
top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16))
if libc.clone(work, top, 0x10000000 | 17, None) > 0:
    raise Held("a user namespace")
"""
# What the process was forked from may still be in its memory: solutions, names of other students.
# `SECRETS` are regular expressions that do not match their own text.
REMAINS = """
wanted = re.compile("|".join(SECRETS).encode())
memory = os.open("/proc/self/mem", os.O_RDONLY)
for line in open("/proc/self/maps"):
    first, last = (int(number, 16) for number in line.split()[0].split("-"))
    for place in range(first, last, 1 << 24):
        try:
            data = os.pread(memory, min(last - place, 1 << 24), place)
        except (OSError, OverflowError):
            break
        if found := wanted.search(data):
            raise Held(found[0])
"""
# The process that started this one knows all questions and all tests.
PARENT = """
for name in ("mem", "environ", "fd", "maps", "cwd", "root", "exe", "auxv", "map_files"):
    for number in {1, os.getppid()} - {0, os.getpid()}:
        path = f"/proc/{number}/{name}"
        try:
            found = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
        except OSError:
            continue
        raise Held(path)
target = os.getppid() or 1
if libc.ptrace(16, target, 0, 0) == 0:
    raise Held("ptrace")
"""
# The claims of a test's result, with what a screen or a file cannot have.
ODD_CLAIM = """
failure = {"kind": "E\\x1b[2J", "message": "\\ud800", "unwritten": ["\\ud800\\x1b[2J"] * 9}
result = {"node": "", "outcome": "failed", "seconds": 0.0, "title": "\\x1b]0;x", "failure": failure}
tell(json.dumps({"results": [result], "ended": "\\x1b[2J"}).encode() + b"\\n")
os._exit(0)
"""
SCREEN = """
class Error(Exception): ...
def put(self, item):
    raise Error("\\x1b[2J\\x1b[Hall \\x9b passed\\u202e\\r\\nm2.1: 10 points")
Shelf.put = put
"""
LINES = """
tell(b"[]\\n" * 300_000)
"""
# Empty files take no space of a disk, only of the kernel. They leave no room for what other
# processes of the exam would write.
FULL = """
for place in ("/tmp/", "/dev/shm/", os.environ["HOME"] + "/"):
    try:
        for count in range(200_000):
            os.close(os.open(f"{place}{count}", os.O_CREAT | os.O_WRONLY))
    except OSError:
        continue
    raise Held("200,000 files")
raise KeyError("full")
"""
# Files that the next process might load instead of the originals.
CACHES = """
import importlib.util, sysconfig
spread = "import sys\\nsys.modules['m2_mini.shelf'].Held = 1\\nopen('/tmp/ran', 'w')\\n"
if os.path.exists("/tmp/ran"):
    raise Held("code of another process")
places = [pathlib.Path.home() / ".local", pathlib.Path.cwd(), pathlib.Path("/tmp"),
          pathlib.Path(sysconfig.get_paths()["purelib"])]
for place in places:
    for name in ("sitecustomize.py", "usercustomize.py", "conftest.py", "tests/conftest.py",
                 "tests/questions.py", "m2_mini/__init__.py", "json.py", "pytest.ini"):
        try:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(spread)
        except OSError:
            pass
for path in pathlib.Path.cwd().rglob("*.py"):
    try:
        cached = pathlib.Path(importlib.util.cache_from_source(str(path)))
        cached.parent.mkdir(exist_ok=True)
        cached.write_bytes(b"nothing")
    except OSError:
        pass
"""
