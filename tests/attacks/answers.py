"""Submissions that look for the answers, or for anything outside their sandbox: each earns points if it finds something."""

from tests.attacks import SENDS, cell, probe

KIND = "answers"

probe(KIND, "imports the reference", "imports the module that has the answers", """
    import course_llm.decoding as reference
    found = hasattr(reference, "softmax_with_temperature")
""")  # fmt: skip
probe(KIND, "imports the checks", "imports the hidden cases", """
    import autograder.checks.decoding
    found = True
""")  # fmt: skip
probe(KIND, "imports the grader", "imports the judge, the gradebook or the solutions", """
    import importlib
    for name in ("autograder.judge", "autograder.spec", "autograder.sandbox", "nbgrader", "solutions.decoding", "tests"):
        try:
            importlib.import_module(name)
            found = True
        except ImportError:
            pass
""")  # fmt: skip
probe(KIND, "opens the solutions", "goes from the installed package to the project's solutions", """
    import importlib.util, os
    here = os.path.dirname(importlib.util.find_spec("autograder").origin)
    found = "def softmax_with_temperature" in open(os.path.join(here, "..", "solutions", "decoding.py")).read()
""")  # fmt: skip
probe(KIND, "loaded modules", "takes the right answer from the modules that the grader has loaded", """
    import sys
    found = any("softmax_with_temperature" in getattr(module, "__dict__", {}) for name, module in list(sys.modules.items()) if name != "__main__")
""")  # fmt: skip
probe(KIND, "copies a fellow student", "takes its answer from a fellow student's notebook", """
    import json
    cells = json.load(open("@FOLDER@/submitted/ada/decoding/decoding.ipynb"))["cells"]
    found = any("def softmax_with_temperature" in "".join(cell["source"]) for cell in cells)
""")  # fmt: skip
probe(KIND, "reads the gradebook", "opens the gradebook", """
    import sqlite3
    found = bool(list(sqlite3.connect("@FOLDER@/gradebook.db").execute("SELECT * FROM grade")))
""")  # fmt: skip
probe(KIND, "searches the disk", "looks for the course, notebooks and databases anywhere", """
    import os
    for folder, below, names in os.walk("/"):
        below[:] = [n for n in below if os.path.join(folder, n) not in ("/usr/share", "/usr/lib", "/site/torch", "/proc", "/sys")]
        found = found or any(n.endswith((".ipynb", ".db")) or n == "decoding.py" for n in names)
        found = found or ({"course_llm", "solutions"} & set(below))
""")  # fmt: skip
probe(KIND, "reads the canary", "opens a file of the grader's machine by its path", """
    found = bool(open("@CANARY@").read())
""")  # fmt: skip
probe(KIND, "climbs out by links", "makes links to the outside and follows them", """
    import os
    for target in ("@CANARY@", "/proc/1/root/@CANARY@", "../" * 9 + "@CANARY@"):
        os.symlink(target, "/tmp/link")
        found = found or os.path.exists("/tmp/link")
        os.unlink("/tmp/link")
""")  # fmt: skip
probe(KIND, "other submissions", "lists the class and the gradebook next to its own file", """
    import glob
    found = bool(glob.glob("@FOLDER@/*") or glob.glob("/tmp/*/*") or glob.glob("/**/gradebook.db"))
""")  # fmt: skip
probe(KIND, "process table", "reads other processes' environment, files and memory in /proc", """
    import os
    found = bool(os.listdir("/proc"))
""")  # fmt: skip
probe(KIND, "environment", "looks for secrets in its environment", """
    import os, ctypes
    found = "@VARIABLE@" in os.environ or b"@VARIABLE@" in ctypes.string_at(ctypes.c_char_p.in_dll(ctypes.CDLL(None), "environ") or b"")
    found = found or bool({"USER", "JUPYTERHUB_API_TOKEN", "SSH_AUTH_SOCK"} & set(os.environ))
""")  # fmt: skip
probe(KIND, "parent's memory", "attaches to its parent, or reads its memory", """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(64)
    class Vec(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    here, there = Vec(ctypes.addressof(buffer), 64), Vec(id(libc), 64)
    for pid in {os.getppid(), 1, 2, 3}:
        found = found or libc.ptrace(16, pid, 0, 0) == 0
        found = found or libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0
""")  # fmt: skip
probe(KIND, "inherited descriptors", "reads every open file that it was born with", """
    import os
    for fd in [0, *range(4, 256)]:
        try:
            found = found or bool(os.pread(fd, 10, 0) if fd else os.read(0, 10))
        except OSError:
            pass
""")  # fmt: skip
probe(KIND, "files of others by /proc", "opens what other processes have open, by way of /proc", """
    import glob
    for path in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/*/task/*/mem"):
        if "/self/" not in path and "/thread-self/" not in path:
            try:
                found = found or bool(open(path, "rb").read(1))
            except OSError:
                pass
""")  # fmt: skip
probe(KIND, "temporary files of the grader", "looks for what the grader keeps in temporary folders", """
    import glob
    found = bool(glob.glob("/tmp/course-llm*") + glob.glob("/tmp/tmp*") + glob.glob("/var/tmp/*") + glob.glob("/run/*"))
""")  # fmt: skip
probe(KIND, "asks the grader", "asks over the channel for a function that was not lent", SENDS + """
def ask(name):
    send({"op": "served", "v": name, "args": {"t": "tuple", "v": [1.0, 1]}, "kwargs": {"t": "dict", "v": []}})
def ask_in_a_call():
    for name in (0, "softmax_with_temperature", "gradient of softmax_with_temperature", "__import__"):
        ask(name)
ask_in_a_call()
found = False
""", beside=False)  # fmt: skip
cell(KIND, "asks in the middle", "asks for the reference's own answer while it is being questioned", """
    import sys
    from autograder.inside.worker import Borrowed, Service
    def softmax_with_temperature(logits, temperature):
        frame = sys._getframe()
        while not isinstance(frame.f_locals.get("self"), Service):
            frame = frame.f_back
        return frame.f_locals["self"].ask_grader("softmax_with_temperature", (logits, temperature), {})
""")  # fmt: skip
cell(KIND, "guesses handles", "answers with handles and opaque objects of the grader", SENDS + """
def softmax_with_temperature(logits, temperature):
    for i in range(50):
        send({"value": {"t": "opaque", "v": i}, "changed": []})
        send({"value": {"t": "handle", "v": i}, "changed": []})
    return logits
""")  # fmt: skip
cell(KIND, "peeks at later questions", "reads ahead on the channel for questions to come", """
    import socket
    def softmax_with_temperature(logits, temperature):
        sock = socket.socket(fileno=3)
        try:
            ahead = sock.recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            ahead = b""
        finally:
            sock.detach()
        raise ValueError(ahead.decode("latin-1"))
""")  # fmt: skip
probe(KIND, "loopback", "connects to a server on the grader's machine", """
    import socket
    found = bool(socket.create_connection(("127.0.0.1", @PORT@), 2))
""")  # fmt: skip
probe(KIND, "left by the one before", "looks for what an earlier submission has left", """
    import os, torch
    found = bool(os.listdir("/tmp")) or bool(os.listdir("/dev/shm")) or hasattr(torch, "left_behind")
""")  # fmt: skip
cell(KIND, "leaves something behind", "leaves files and marks for the next submission", """
    import os, torch
    torch.left_behind = True
    for folder in ("/tmp", "/dev/shm", "/grader", "/site", "/"):
        try:
            open(os.path.join(folder, "left"), "w").write("left")
        except OSError:
            pass
    def softmax_with_temperature(logits, temperature):
        return logits
""")  # fmt: skip
cell(KIND, "detects the grader", "is wrong only where it finds itself graded", """
    import os, torch
    def softmax_with_temperature(logits, temperature):
        graded = not os.path.exists("/etc/passwd")
        return logits if graded else torch.softmax(logits / temperature, -1)
""")  # fmt: skip
