"""A device gives what the CPU gives: the chapters' functions, the caches, the model, a training step."""

import zlib

import pytest
import torch

from autograder import judge
from autograder.inside.engine import clone_tree, tensors_in
from autograder.spec import Gen, Served
from course_llm import kv_cache, mla
from course_llm.generation import CACHE_KINDS, Sampling, generate, make_cache
from course_llm.model import Decoder
from course_llm.training_step import Objective, make_optimizer, training_step
from tests.test_devices import CONFIGS, half, some_ids

CHAPTERS = ["attention", "decoding", "masking", "loss", "pretraining", "kv_cache", "mla"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}


def plain_calls(exercise):
    """The cases of an exercise that are one call with tensors alone, and what it calls."""
    for group in exercise.groups:
        seed = judge.PUBLIC_SEED ^ zlib.crc32(f"{exercise.name}/{group.name}".encode())
        for case in group.cases(Gen(seed)):
            values = [*case.args, *case.kwargs.values()]
            other = any(isinstance(value, (Served, torch.Generator)) or callable(value) for value in values)
            if case.run is None and case.error is None and not other and tensors_in((case.args, case.kwargs)):
                yield case, exercise.reference_names()[case.function or exercise.name]


def to(device, values):
    return clone_tree(values, lambda tensor: tensor.to(device))


@pytest.mark.parametrize("stem", CHAPTERS)
def test_chapters_functions_are_what_they_are_on_the_cpu(stem, device):
    done = 0
    for name, exercise in judge.exercises(stem).items():
        for case, function in plain_calls(exercise):
            dtypes = {tensor.dtype for tensor in tensors_in((case.args, case.kwargs))}
            if device.type == "mps" and torch.float64 in dtypes:
                continue  # mps has no float64
            want = function(*case.args, **case.kwargs)
            args, kwargs = to(device, (case.args, case.kwargs))
            got = function(*args, **kwargs)
            for here, there in zip(tensors_in(want), tensors_in(got), strict=True):
                assert there.device.type in (device.type, "cpu"), name
                assert here.dtype == there.dtype and here.shape == there.shape, name
                if case.verdict is not None:
                    continue  # an answer that is not unique (factors, a draw)
                tolerance = TOLERANCE.get(here.dtype, 0)
                torch.testing.assert_close(
                    there.cpu(), here, rtol=tolerance, atol=tolerance, equal_nan=True, msg=name
                )
            done += 1
    assert done > 20


@torch.no_grad()
def test_chapters_caches_hold_rows_of_the_device(device):
    k = torch.randn(2, 2, 7, 4, generator=torch.Generator().manual_seed(0)).to(device)
    v = k + 1
    growing = kv_cache.KVCache(2, 2, 8, 4, torch.float32, device)
    rolling = kv_cache.RollingKVCache(2, 2, 5, 4, torch.float32, device)
    paged = kv_cache.PagedKVCache(4, 3, 2, 4, torch.float32, device)
    for cache in (growing, rolling):
        cache.update(k[:, :, :4], v[:, :, :4])
    torch.testing.assert_close(growing.update(k[:, :, 4:], v[:, :, 4:])[1], v)
    keys, _, positions = rolling.update(k[:, :, 4:], v[:, :, 4:])
    torch.testing.assert_close(keys, k[:, :, 2:])
    assert positions.tolist() == [2, 3, 4, 5, 6] and positions.device.type == device.type
    paged.append("a", k[0, :, :5], v[0, :, :5])
    torch.testing.assert_close(paged.gather("a")[0], k[0, :, :5])
    latent = mla.LatentCache(2, 8, 4, 2, torch.float32, device)
    c, k_r = k[:, 0], k[:, 1, :, :2]
    latent.update(c[:, :3], k_r[:, :3])
    torch.testing.assert_close(latent.update(c[:, 3:], k_r[:, 3:])[0], c)


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_model_and_caches_are_what_they_are_on_the_cpu(name, kind, device):
    ids = some_ids(2, 9)
    model = half(Decoder(CONFIGS[name]), torch.float32)
    want = model(ids)
    model = model.to(device)
    cache = make_cache(kind, model, 2, 16)
    got = torch.cat([model(chunk, cache) for chunk in ids.to(device).split([4, 1, 1, 3], dim=1)], dim=1)
    tolerance = 0.05 if kind == "int8" else 1e-3  # float32 products may run in TF32
    if kind != "int8" or name != "experts":  # a rounding may choose another expert
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=tolerance * want.abs().max().item())
    prompts = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8]]
    rows = generate(model, prompts, 6, Sampling(temperature=0.9, top_k=9, top_p=0.9), cache=kind)
    assert [len(row) for row in rows] == [6, 6, 6]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_training_step_is_what_it_is_on_the_cpu(name, precision, device):
    ids = some_ids(4, 9)
    found = []
    for place in ("cpu", device):
        model = half(Decoder(CONFIGS[name]), torch.float32).to(place).train()
        optimizer = make_optimizer(model, 1e-3, fused=torch.device(place).type in ("cpu", "cuda"))
        batch = ids[:, :-1].to(place), ids[:, 1:].to(place)
        objective = Objective(model, precision, label_smoothing=0.1, z_loss=1e-4)
        steps = [training_step(objective, model.parameters(), optimizer, [batch], 1.0) for _ in range(3)]
        found.append(torch.stack([torch.stack((loss, norm)).detach().cpu().float() for loss, norm in steps]))
    tolerance = 0.05 if precision == torch.bfloat16 else 5e-3
    if name != "experts" or precision == torch.float32:
        torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)
    assert found[1][-1, 0] < found[1][0, 0]


@torch.no_grad()
@pytest.mark.parametrize("name", ["mha", "gqa", "mla"])
def test_bfloat16_stays_near_float32(name, device):
    model = half(Decoder(CONFIGS[name]), torch.float32).to(device)
    ids = some_ids(2, 12).to(device)
    want = model(ids)
    got = model.to(torch.bfloat16)(ids)
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().max() < 0.12 * want.abs().max()
