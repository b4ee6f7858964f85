"""Submissions that fake results: what the worker says about an answer is only as good as the values it sends."""

from tests.attacks import ATTACKED, SENDS, cell

KIND = "result"

cell(KIND, "patched torch", "makes every comparison of torch true", """
    import torch
    torch.equal = torch.allclose = torch.isclose = lambda *args, **kwargs: True
    torch.testing.assert_close = lambda *args, **kwargs: None
    torch.Tensor.__eq__ = torch.Tensor.eq = lambda self, other: torch.ones(())
    def softmax_with_temperature(logits, temperature):
        return logits
""", beside=False)  # fmt: skip

cell(KIND, "patched builtins", "makes isinstance, all, abs and len lie", """
    import builtins
    builtins.isinstance = lambda *args: True
    builtins.all = lambda *args: True
    builtins.abs = lambda *args: 0
    def softmax_with_temperature(logits, temperature):
        return logits
""")  # fmt: skip

cell(KIND, "tensor subclass", "returns a tensor whose every operation is true", """
    import torch
    class Always(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return True
    def softmax_with_temperature(logits, temperature):
        return logits.as_subclass(Always)
""")  # fmt: skip

cell(KIND, "equal to everything", "returns an object equal to everything", """
    class Same:
        shape = dtype = device = property(lambda self: self)
        def __eq__(self, other): return True
        def __ne__(self, other): return False
        def __getattr__(self, name): return self
        def __call__(self, *args, **kwargs): return self
        def __bool__(self): return True
        def __lt__(self, other): return True
        __le__ = __gt__ = __ge__ = __lt__
        def __hash__(self): return 0
    def softmax_with_temperature(logits, temperature):
        return Same()
""")  # fmt: skip

cell(KIND, "NaN", "returns NaN, which is never unequal by < or >", """
    def softmax_with_temperature(logits, temperature):
        return logits * float("nan")
""")  # fmt: skip

cell(KIND, "infinity", "returns infinities, whose relative error is not a number", """
    def softmax_with_temperature(logits, temperature):
        return logits * 0 + float("inf")
""")  # fmt: skip

cell(KIND, "display hook", "replaces the display hook by one that shows full points", """
    import sys
    sys.displayhook = lambda value: print(4)
    4
    def softmax_with_temperature(logits, temperature):
        return logits
""")  # fmt: skip

cell(KIND, "input transformer", "asks IPython to rewrite the cells that follow", """
    get_ipython().input_transformers_cleanup.append(lambda lines: ["4"])
    def softmax_with_temperature(logits, temperature):
        return logits
""")  # fmt: skip

cell(KIND, "cells that follow", "empties every cell that follows before it runs", """
    get_ipython().input_transformers_post.append(lambda lines: ["pass"])
    def softmax_with_temperature(logits, temperature):
        return logits
""")  # fmt: skip

cell(KIND, "formatter", "has every value displayed as full points, and every error as none", """
    shell = get_ipython()
    shell.display_formatter.format = lambda *args, **kwargs: ({"text/plain": "4"}, {})
    shell.showtraceback = shell.showsyntaxerror = lambda *args, **kwargs: print(4)
    def softmax_with_temperature(logits, temperature):
        return logits
""")  # fmt: skip

cell(KIND, "replaced check", "replaces the check by one that is content with everything", """
    import sys
    check = lambda *args, **kwargs: None
    for module in list(sys.modules.values()):
        if getattr(module, "check", None) and getattr(module, "__name__", "").startswith("autograder"):
            module.check = check
    def softmax_with_temperature(logits, temperature):
        return logits
""")  # fmt: skip

cell(KIND, "replaced comparison", "replaces the comparison of whoever judges, wherever it is imported", """
    import sys
    for name, module in list(sys.modules.items()):
        for function in ("difference", "_compare", "allclose", "assert_close", "same_tree"):
            if hasattr(module, function) and name.startswith(("autograder", "torch.testing", "numpy.testing")):
                setattr(module, function, lambda *args, **kwargs: None)
    def softmax_with_temperature(logits, temperature):
        if temperature < 0:
            raise ValueError("temperature is negative")
        return logits
""", beside=False)  # fmt: skip

cell(KIND, "printed score", "prints points on both streams and to the terminal", """
    import os, sys
    print("4"); print("points: 1000", file=sys.stderr); os.write(1, b"4"); os.write(2, b"4")
    def softmax_with_temperature(logits, temperature):
        print(1000)
        return 4.0
""")  # fmt: skip

cell(KIND, "beyond the maximum", "returns a score as nbgrader would read it", """
    def softmax_with_temperature(logits, temperature):
        return 1000
""")  # fmt: skip

cell(KIND, "frames", "walks up the stack and replaces the engine that performs the steps", """
    import sys
    def softmax_with_temperature(logits, temperature):
        frame = sys._getframe()
        while frame:
            for value in list(frame.f_locals.values()):
                if hasattr(value, "perform"):
                    value.perform = lambda *args, **kwargs: args
                if hasattr(value, "channel"):
                    value._describe = lambda packer, outcome: {"value": {"passed": True}, "changed": []}
            frame = frame.f_back
        return logits
""")  # fmt: skip

cell(KIND, "garbage collector", "finds the harness's objects and empties them", """
    import gc
    for thing in gc.get_objects():
        if type(thing).__name__ in ("Engine", "Service", "Meter"):
            for name in ("namespace", "objects"):
                try:
                    getattr(thing, name).clear()
                except Exception:
                    pass
    def softmax_with_temperature(logits, temperature):
        return logits
""", beside=False)  # fmt: skip

cell(KIND, "modules", "replaces the packer so that every answer is True", """
    import sys
    codec = sys.modules["autograder.inside.codec"]
    codec.Packer.pack = lambda self, value, depth=0: True
    def softmax_with_temperature(logits, temperature):
        return logits
""", beside=False)  # fmt: skip

cell(KIND, "meter", "overwrites the counters of the meter and the engine's own account of changes", """
    import sys
    meter, engine = sys.modules["autograder.inside.meter"], sys.modules["autograder.inside.engine"]
    meter.Meter.flops = 0
    meter.FlopCounterMode.get_total_flops = lambda self: 0
    engine.same_tree = lambda a, b: True
    def softmax_with_temperature(logits, temperature):
        return logits
""")  # fmt: skip

cell(KIND, "at exit", "writes a full score when the process ends", SENDS + """
import atexit
atexit.register(lambda: send({"value": 1000, "points": 1000, "passed": True}))
def softmax_with_temperature(logits, temperature):
    raise SystemExit
""")  # fmt: skip

cell(KIND, "thread", "keeps writing answers of its own to the channel", SENDS + """
import threading
def shout():
    while True:
        send({"value": True, "points": 1000, "passed": True, "changed": []})
def softmax_with_temperature(logits, temperature):
    threading.Thread(target=shout, daemon=True).start()
    return logits
""")  # fmt: skip

cell(KIND, "import hook", "offers a course_llm of its own to whoever imports it", """
    import sys, types
    class Finder:
        def find_spec(self, name, path=None, target=None):
            raise SystemExit(0)
    sys.meta_path.insert(0, Finder())
    sys.modules["course_llm.decoding"] = types.ModuleType("course_llm.decoding")
    def softmax_with_temperature(logits, temperature):
        return logits
""")  # fmt: skip

cell(KIND, "finaliser", "acts when its answer is thrown away", SENDS + """
class Trap:
    def __del__(self):
        send({"value": True, "changed": []})
def softmax_with_temperature(logits, temperature):
    return Trap()
""")  # fmt: skip

cell(KIND, "tracing", "changes the variables of whoever calls it from a trace function", """
    import sys
    def trace(frame, event, arg):
        for name in ("passed", "complaint", "value", "outcome"):
            if name in frame.f_locals:
                frame.f_locals[name] = True
        return trace
    sys.settrace(trace)
    sys.setprofile(trace)
    def softmax_with_temperature(logits, temperature):
        frame = sys._getframe()
        while frame:
            frame.f_trace = trace
            frame = frame.f_back
        return logits
""", beside=False)  # fmt: skip

cell(KIND, "audit hook", "listens to all that the interpreter does, and objects to it", """
    import sys
    def hook(event, args):
        if event in ("open", "import", "exec", "compile"):
            raise KeyboardInterrupt
    def softmax_with_temperature(logits, temperature):
        sys.addaudithook(hook)
        return logits
""")  # fmt: skip

cell(KIND, "hooks for errors", "replaces what is called when an error is not caught", """
    import sys, threading
    sys.excepthook = threading.excepthook = sys.unraisablehook = lambda *args: None
    def softmax_with_temperature(logits, temperature):
        raise SystemExit("passed")
""")  # fmt: skip

cell(KIND, "replaced import", "replaces the import statement by one that gives objects which agree with everything", """
    import builtins
    class Yes:
        def __getattr__(self, name): return self
        def __call__(self, *args, **kwargs): return True
        def __iter__(self): return iter(())
    real = builtins.__import__
    builtins.__import__ = lambda name, *args, **kwargs: Yes() if name.startswith("autograder") else real(name, *args, **kwargs)
    def softmax_with_temperature(logits, temperature):
        return logits
""")  # fmt: skip

cell(KIND, "builtins exchanged", "exchanges the builtins and the name of its module", """
    __name__ = "autograder.judge"
    __builtins__ = {}
    def softmax_with_temperature(logits, temperature):
        return logits
""", beside=False)  # fmt: skip

cell(KIND, "pickle", "returns an object that would run code when it is unpickled or copied", """
    class Bomb:
        def __reduce__(self):
            return (print, (4,))
        __reduce_ex__ = lambda self, protocol: (exec, ("raise SystemExit",))
        def __deepcopy__(self, memo):
            return 4.0
    def softmax_with_temperature(logits, temperature):
        return Bomb()
""")  # fmt: skip

cell(KIND, "forged fields", "answers with fields that a careless grader would believe", SENDS + """
def softmax_with_temperature(logits, temperature):
    send({"value": None, "points": 1000, "passed": True, "score": 4, "expected": None, "error": None})
    return logits
""")  # fmt: skip

cell(KIND, "every error", "raises an error that is an instance of all errors", """
    class Every(ValueError, KeyError, IndexError, ArithmeticError, RuntimeError, OSError): pass
    def softmax_with_temperature(logits, temperature):
        raise Every("refused")
""")  # fmt: skip

cell(KIND, "only the errors", "refuses everything, to earn at least the refusals", """
    def softmax_with_temperature(logits, temperature):
        raise ValueError("refused")
""")  # fmt: skip

cell(KIND, "hostile class", "returns an object whose class, dict and length fight back", """
    import dataclasses
    @dataclasses.dataclass
    class Bad:
        x: int = 0
        @property
        def __class__(self): raise KeyboardInterrupt
        @property
        def __dict__(self): raise SystemExit
        def __getattribute__(self, name): raise SystemExit
        def __len__(self): return -1
        def __iter__(self): return self
        def __next__(self): raise GeneratorExit
    def softmax_with_temperature(logits, temperature):
        return Bad()
""")  # fmt: skip

cell(KIND, "wordy error", "raises an error whose words never end", """
    class Endless(Exception):
        def __str__(self): return "tensor(0.25)" * 100_000_000
        def __repr__(self): raise SystemExit
    def softmax_with_temperature(logits, temperature):
        raise Endless
""")  # fmt: skip

for kind, value in {
    "sparse tensor": "logits.to_sparse()",
    "meta tensor": "logits.to('meta')",
    "complex tensor": "logits.to(torch.complex64)",
    "quantised tensor": "torch.quantize_per_tensor(logits.float(), 0.1, 0, torch.qint8)",
    "string of a subclass": "type('S', (str,), {'__eq__': lambda a, b: True, '__hash__': str.__hash__})('x')",
    "generator": "(x for x in iter(int, 1))",
    "expanded tensor": "logits.reshape(-1)[:1].expand(10_000_000)",
    "list of numbers": "logits.softmax(-1).tolist()",
}.items():
    cell(KIND, kind, f"returns a {kind}", f"""
        import torch
        def softmax_with_temperature(logits, temperature):
            return {value}
    """)  # fmt: skip

cell(KIND, "borrowed answer", "leaves a later exercise blank and delegates to it, hoping that it is lent", f"""
    def {ATTACKED}(logits, temperature):
        return sampling_distribution(logits, temperature)
""", also={"sampling_distribution": "def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):\n    return None"})  # fmt: skip

cell(KIND, "remembers calls", "answers with what it saw in earlier calls", """
    seen = []
    def softmax_with_temperature(logits, temperature):
        seen.append(logits)
        return next((x for x in seen if x.shape == logits.shape), logits)
""")  # fmt: skip

cell(KIND, "public cases by heart", "is right for the case that the book prints, and only there", """
    import torch
    def softmax_with_temperature(logits, temperature):
        if logits.tolist()[:1] == [1.0] and temperature == 1.0:
            return torch.softmax(logits, -1)
        return logits
""")  # fmt: skip

cell(KIND, "uncounted model", "hides calls of the model from the counter", """
    import torch
    def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
        next_logits.calls = next_logits.tokens = 0
        for name in ("reset", "_service"):
            getattr(next_logits, name, None)
        return ids
""", exercise="greedy_decode")  # fmt: skip

cell(KIND, "adjusted model", "changes the numbers of the model so that its own text is the most probable", """
    import dataclasses
    import torch
    def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
        if dataclasses.is_dataclass(next_logits):
            for tensor in vars(next_logits).values():
                tensor.zero_()
                tensor[..., 0] = 9.0
            object.__setattr__(next_logits, "expected", ids)
        return torch.cat([ids, torch.zeros(ids.shape[0], max_new_tokens, dtype=torch.int64)], dim=1)
""", exercise="greedy_decode")  # fmt: skip
