"""Submissions that do harm: to the machine, to the grader's time and memory, to the others."""

from tests.attacks import SENDS, cell, probe

KIND = "harm"


def body(name: str, words: str, code: str, says: str | None = None, **options) -> None:
    """An attack in the body of the function."""
    lines = "\n".join("    " + line for line in code.strip().splitlines())
    cell(
        KIND,
        name,
        words,
        f"def softmax_with_temperature(logits, temperature):\n{lines}\n    return logits",
        says=says,
        **options,
    )


body("endless loop", "does not come to an end", "while True: pass", says="time is up")
body("loop that swallows interrupts", "catches whatever should stop it", """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    try:
        while True: pass
    except BaseException:
        pass
""", says="time is up")  # fmt: skip
body(
    "loop in C",
    "is stuck where no Python signal arrives",
    "import re\nre.match(r'(a+)+$', 'a' * 64 + 'b')",
    says="time is up",
)
body(
    "sleeps",
    "waits without using the processor",
    "import time\nwhile True: time.sleep(1000)",
    says="time is up",
)
body("fork bomb", "forks without end", "import os\nwhile True: os.fork()")
body("thread bomb", "starts threads without end", """
import threading, time
threading.stack_size(32768)
while True:
    threading.Thread(target=time.sleep, args=(1000,)).start()
""", says="thread")  # fmt: skip
body("memory", "takes all the memory there is", "hoard = []\nwhile True: hoard.append(b'x' * (1 << 26))")
body("disk", "fills the disk", """
import os
for i in range(10_000):
    with open(f'/tmp/{i}', 'wb') as file:
        file.write(bytes(1 << 22))
""")  # fmt: skip
body(
    "sparse file",
    "makes a file of a terabyte",
    "import os\nos.truncate(os.open('/tmp/x', os.O_CREAT | os.O_RDWR), 1 << 40)",
)
body(
    "many files",
    "makes files without end",
    "i = 0\nwhile True:\n    open(f'/tmp/{i}', 'w').close()\n    i += 1",
)
body(
    "output flood",
    "prints gigabytes",
    "import sys\nfor _ in range(1000): sys.stdout.write('x' * (1 << 20)); sys.stderr.write('x' * (1 << 20))",
)
body("huge tensor", "makes a tensor of terabytes", "import torch\nreturn torch.zeros(1 << 40)")
body("large answers", "answers every question with 60 MB", "import torch\nreturn torch.zeros(15 << 20)")
body(
    "deep recursion",
    "recurses until the stack ends",
    "import sys\nsys.setrecursionlimit(10 ** 9)\ndef down(x): return down([x])\nreturn down(0)",
)
body(
    "deep answer",
    "answers with lists a hundred thousand deep",
    "x = []\nfor _ in range(100_000): x = [x]\nreturn x",
)
body("wide answer", "answers with millions of items", "return list(range(3_000_000))")
body(
    "circular answer",
    "answers with a list that contains itself",
    "x = []\nx.append(x)\nx.append({1: x})\nreturn x",
)
body("enormous whole number", "answers with a number of a million digits", "return 1 << 4_000_000")
body("segmentation fault", "reads address 0", "import ctypes\nctypes.string_at(0)", says="crash")
body("ends the process", "calls os._exit", "import os\nos._exit(0)", says="ended by itself")
body("leaves quietly", "calls sys.exit", "import sys\nsys.exit(0)")
body("interrupts", "raises KeyboardInterrupt", "raise KeyboardInterrupt")
body("kills its parent", "sends signals to its parent and to everybody", """
import os, signal
for target in (os.getppid(), -1, 0, 1, 2):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(target, number)
        except OSError:
            pass
""")  # fmt: skip
body(
    "stops itself",
    "stops and never answers",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nos.kill(0, signal.SIGTSTP)",
)
body("closes the channel", "closes its channel and waits", "import os, time\nos.close(3)\ntime.sleep(2)")
body("daemon", "tries to outlive its process", """
import os, subprocess, time
def child():
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
        os._exit(0)
def command(): subprocess.Popen(['/bin/sleep', '1000'])
def spawned(): os.posix_spawn('/bin/sleep', ['sleep', '1000'], {})
for start in () if os.environ.get("STARTED") else (child, command, spawned):
    try:
        start()
    except OSError:
        pass
os.environ["STARTED"] = "1"
""")  # fmt: skip
probe(KIND, "writes outside", "writes to home, start-up files and the libraries", """
    import os, site, sys
    for path in ("@FOLDER@/written", "@HOME@/.bashrc", "@HOME@/.profile", "/usr/lib/python3/sitecustomize.py", "/site/torch/__init__.py",
                 "/site/sitecustomize.py", "/etc/passwd", "/grader/x", "/var/tmp/x", "/home/x"):
        try:
            open(path, "a").write("x")
            found = True
        except OSError:
            pass
""")  # fmt: skip
probe(KIND, "changes the gradebook", "gives those who are graded already 0 points", """
    import sqlite3
    with sqlite3.connect("@FOLDER@/gradebook.db") as gradebook:
        found = gradebook.execute("UPDATE grade SET auto_score = 0, manual_score = 0 WHERE auto_score IS NOT NULL").rowcount > 0
""")  # fmt: skip
probe(KIND, "spoils the others' notebooks", "overwrites the submissions that are still to be graded", """
    import glob
    for path in glob.glob("@FOLDER@/submitted/*/decoding/decoding.ipynb"):
        if "/ada/" not in path:
            open(path, "w").write("{}")
            found = True
""")  # fmt: skip
probe(KIND, "start-up file", "leaves a start-up file that breaks torch in every kernel to come", """
    import os
    folder = "@HOME@/.ipython/profile_default/startup"
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/00.py", "w") as file:
        file.write("import torch\\ntorch.where = torch.Tensor.softmax = lambda *args, **kwargs: None\\n")
    found = True
""")  # fmt: skip
probe(KIND, "files of the interpreter", "writes a .pth file or a module where the next interpreter looks", """
    import os, site, sys
    for folder in {*sys.path, *site.getsitepackages(), site.getusersitepackages(), "@HOME@/.config", "@HOME@/.jupyter"}:
        if folder.startswith("/") and folder != "/tmp":
            try:
                open(os.path.join(folder, "zz_left.pth"), "w").write("import os")
                found = True
            except OSError:
                pass
""")  # fmt: skip
body("timer", "has a timer send it signals without end", """
import signal
signal.signal(signal.SIGALRM, lambda *args: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
""")  # fmt: skip
body("dumps into the channel", "has the interpreter write its stack into the channel, from C", """
import faulthandler, time
faulthandler.dump_traceback_later(0.001, repeat=True, file=3)
time.sleep(0.2)
""", says="malformed")  # fmt: skip
probe(KIND, "opens sockets", "opens sockets of every kind", """
    import socket
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
            try:
                socket.socket(family, kind)
                found = True
            except OSError:
                pass
""")  # fmt: skip
probe(KIND, "more privileges", "mounts, changes its user, its limits, its namespaces and its root", """
    import ctypes, os, resource
    libc = ctypes.CDLL(None)
    found = any(code == 0 for code in (libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), libc.unshare(0x10000000), libc.chroot(b"/tmp"),
                                       libc.umount2(b"/proc", 2), libc.setns(3, 0), libc.syscall(272, 0x10000000)))
    for attempt in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: resource.setrlimit(resource.RLIMIT_CPU, (1, 1))):
        try:
            attempt()
            found = True
        except (OSError, ValueError):
            pass
""")  # fmt: skip
probe(KIND, "image of a crash", "asks that a crash leaves an image of the memory with a program of the grader's machine", """
    import ctypes
    libc = ctypes.CDLL(None)
    for option in (4, (1 << 32) + 4):
        libc.syscall(157, ctypes.c_ulong(option), 1, 0, 0, 0)
    found = libc.prctl(3, 0, 0, 0, 0) != 0
""")  # fmt: skip
probe(KIND, "a queue of the machine", "takes all asynchronous requests that the machine has", """
    import ctypes
    found = ctypes.CDLL(None).syscall(206, 60_000, ctypes.byref(ctypes.c_ulong(0))) == 0
""")  # fmt: skip

# the channel


def frame(
    name: str, words: str, code: str, says: str | None = None, exercise: str = "softmax_with_temperature"
) -> None:
    """An attack that writes frames of its own."""
    lines = "\n".join("    " + line for line in code.strip().splitlines())
    cell(
        KIND,
        name,
        words,
        f"{SENDS}\ndef {exercise}(*args, **kwargs):\n{lines}\n    return None",
        says=says,
        exercise=exercise,
    )


frame(
    "a length that lies",
    "announces an exabyte",
    "os.write(3, struct.pack('<4sIQ', b'cllm', 10, 1 << 60) + b'0' * 10)",
    says="malformed",
)
frame(
    "a text that lies",
    "announces four gigabytes of JSON",
    "os.write(3, struct.pack('<4sIQ', b'cllm', (1 << 32) - 1, 0))",
    says="malformed",
)
frame("not a frame", "writes noise", "os.write(3, os.urandom(100_000))", says="malformed")
frame("deep JSON", "nests JSON a hundred thousand deep", "send(None, names=b'[' * 100_000)", says="malformed")
frame(
    "deep objects",
    "nests JSON as deep as the reader can",
    "send(None, names=b'{\"changed\":[' + b'[' * 900 + b']' * 900 + b'],\"value\":null}')",
)
frame(
    "wide JSON",
    "sends a million empty lists",
    "send({'value': {'t': 'list', 'v': [[]] * 1_000_000}})",
    says="malformed",
)
frame("a dtype that lies", "sends a tensor of a dtype that does not exist", """
head = json.dumps({"0": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}).encode()
send({"value": {"t": "tensor", "v": 0}, "changed": []}, struct.pack("<Q", len(head)) + head + bytes(16))
""", says="malformed")  # fmt: skip
frame("a shape that lies", "sends four bytes as a tensor of exabytes", """
head = json.dumps({"0": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 4]}}).encode()
send({"value": {"t": "tensor", "v": 0}, "changed": []}, struct.pack("<Q", len(head)) + head + bytes(4))
""", says="malformed")  # fmt: skip
frame("half a truth", "sends booleans that are neither true nor false", """
head = json.dumps({"0": {"dtype": "BOOL", "shape": [7], "data_offsets": [0, 7]}}).encode()
send({"value": {"t": "tensor", "v": 0}, "changed": []}, struct.pack("<Q", len(head)) + head + bytes([2, 3, 255, 1, 0, 128, 7]))
""")  # fmt: skip
frame("empty tensors", "sends tens of thousands of empty tensors", """
head = json.dumps({str(i): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(40_000)}).encode()
send({"value": None, "changed": []}, struct.pack("<Q", len(head)) + head)
""", says="malformed")  # fmt: skip
frame("colliding keys", "sends a dict whose keys all have one hash", """
send({"value": {"t": "dict", "v": [[i * ((1 << 61) - 1), 0] for i in range(90_000)]}, "changed": []})
""", says="malformed")  # fmt: skip
frame("many generators", "sends a hundred thousand generators", """
head = json.dumps({"0": {"dtype": "U8", "shape": [5056], "data_offsets": [0, 5056]}}).encode()
one = {"t": "generator", "v": {"t": "tensor", "v": 0, "device": "cpu"}}
send({"value": {"t": "list", "v": [one] * 40_000}, "changed": []}, struct.pack("<Q", len(head)) + head + bytes(5056))
""", says="malformed")  # fmt: skip
frame("controls the terminal", "puts escape sequences and markup into what the report shows", """
send({"value": {"t": "other", "v": "\\x1b[2J[bold]<script>alert(1)</script>"}, "changed": ["\\x1b[2J<script>"]})
""")  # fmt: skip
frame(
    "drips",
    "sends one byte at a time",
    "import time\nwhile True:\n    os.write(3, b'c')\n    time.sleep(0.01)",
    says="malformed",
)
cell(KIND, "out of band", "wakes the grader with bytes that are no data", """
    import socket, time
    def softmax_with_temperature(logits, temperature):
        sock = socket.socket(fileno=3)
        for _ in range(20):
            try:
                sock.send(b"x", socket.MSG_OOB)
            except OSError:
                pass
            time.sleep(0.05)
        sock.detach()
        return logits
""")  # fmt: skip

# the trusted side's own work

cell(KIND, "calls the model for ever", "calls what it was given without end", """
    def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
        while True:
            next_logits(ids)
""", exercise="greedy_decode", says="time is up")  # fmt: skip
cell(KIND, "calls the grader for ever", "calls without end what the grader answers", """
    def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
        while type(next_logits).__name__ == "Remote":
            next_logits(ids)
        return ids
""", exercise="greedy_decode", says="far too often")  # fmt: skip
cell(KIND, "gives the model a book", "calls the model with millions of tokens", """
    import torch
    def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
        return next_logits(torch.zeros(1, 4_000_000, dtype=torch.int64))
""", exercise="greedy_decode")  # fmt: skip
cell(KIND, "a long text for the model", "calls the model with texts as long as it may", """
    import torch
    def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
        for _ in range(100 if type(next_logits).__name__ == "Remote" else 0):
            try:
                next_logits(torch.zeros(1, 200_000, dtype=torch.int64))
            except RuntimeError:
                pass
        return ids
""", exercise="greedy_decode")  # fmt: skip
cell(KIND, "sizes the histogram", "returns token ids in the billions, which size the grader's own counts", """
    import torch
    def generate(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
        new = torch.full((ids.shape[0], max_new_tokens), 1 << 31, dtype=torch.int64)
        return torch.cat([ids, new], dim=1)
""", exercise="generate")  # fmt: skip
