"""Checks of the vLLM engine's settings that need no vLLM."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import sys
import types
import uuid
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig

from posttrain.batch import Prompt
from posttrain.errors import DataError, EngineError, MissingExtra, RecipeError
from posttrain.models import weights
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import EngineSection, Server, Vllm
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import vllm_start
from posttrain.rollout.engine import check_fits, needed_length
from posttrain.rollout.engine_log import root_cause
from posttrain.rollout.make_engine import check_engine, make_engine, start_note
from posttrain.rollout.probe import mean_gap, probe_ids, trainer_logps
from posttrain.rollout.vllm_engine import adapter_rank, engine_dtype, window_of


def test_missing_vllm_raises_with_an_install_hint(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    with pytest.raises(MissingExtra, match=r"needs vllm(.|\n)*posttrain\[vllm\]"):
        make_engine(EngineSection(engine="vllm"), loaded, scratch=tmp_path, max_len=64)
    assert not list(tmp_path.iterdir())


def test_window_is_the_length_the_data_needs(loaded: LoadedModel) -> None:
    assert window_of(Vllm(), loaded, 96) == 96
    assert window_of(Vllm(max_model_len=128), loaded, 96) == 128
    with pytest.raises(RecipeError, match=r"max_model_len is 64(.|\n)*need 96"):
        window_of(Vllm(max_model_len=64), loaded, 96)
    with pytest.raises(RecipeError, match=r"300 tokens is more than the model's own, 256"):
        window_of(Vllm(), loaded, 300)


def test_needed_length_is_the_smallest_accepted_window(prompts: list[Prompt]) -> None:
    """The longest prompt has 11 tokens: 11 + 20 = 31 fit a window of 31 and not one of 30."""
    sampling = Sampling(max_new_tokens=20)
    assert needed_length(prompts, sampling) == 31
    check_fits(prompts, sampling, 31)
    with pytest.raises(DataError, match="row p4"):
        check_fits(prompts, sampling, 30)


def test_lora_rank_is_rounded_up_to_vllms_slots() -> None:
    assert [vllm_start.lora_slot(r) for r in (1, 8, 9, 100, 512)] == [8, 8, 16, 128, 512]
    with pytest.raises(RecipeError, match="at most 512"):
        vllm_start.lora_slot(513)


def test_socket_files_get_a_folder_with_a_short_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM names them by a UUID; Linux allows paths of 107 bytes. A folder set by the user is kept."""
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    longest = Path("/" + "f" * (107 - len(f"//{uuid.uuid4()}")))
    assert vllm_start.socket_settings(longest) == {"VLLM_RPC_BASE_PATH": str(longest)}
    assert vllm_start.socket_settings(Path(f"{longest}f")) == {}
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/mine")
    assert vllm_start.socket_settings(longest) == {}


def test_vllm_logging_is_silenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before vLLM configures its logging, unless the user asks for it."""
    given = vllm_start.arguments(spec(None), tmp_path)
    assert given["use_tqdm_on_load"] is False
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.NOTSET)
    logged, handler = list[logging.LogRecord](), logging.Handler()
    monkeypatch.setattr(handler, "emit", logged.append)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    for level, told in (("ERROR", []), ("info", ["Triton is installed"])):
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
        with warnings.catch_warnings(record=True) as warned:
            vllm_start.limit_logging()
            logging.getLogger("vllm.triton_utils.importing").warning("Triton is installed")
            for module in ("vllm.triton_utils.dispatcher", "mine"):
                warnings.warn_explicit("reduce_op", FutureWarning, f"{module}.py", 138, module=module)
        assert [str(w.filename) for w in warned] == ["mine.py"]
        assert [record.getMessage() for record in logged] == told


def test_notes_before_an_engine_starts() -> None:
    assert start_note(EngineSection()) is None
    assert start_note(EngineSection(engine="vllm")) == (
        "starting vLLM: up to two minutes, less with vllm.enforce_eager: true"
    )
    assert start_note(EngineSection(engine="vllm", vllm=Vllm(enforce_eager=True))) == "starting vLLM"
    assert start_note(EngineSection(engine="vllm", vllm=Vllm.model_validate({"server": "servers.txt"}))) is None
    assert start_note(EngineSection(engine="vllm", vllm=Vllm.model_validate({"server": {"devices": [1]}})))


def spec(lora_rank: int | None, **settings: Any) -> vllm_start.EngineSpec:
    return vllm_start.EngineSpec(Vllm(**settings), torch.bfloat16, 64, lora_rank, (1,))


def test_arguments_for_weight_transfer_or_adapters(tmp_path: Path) -> None:
    full = vllm_start.arguments(spec(None), tmp_path)
    assert (full["load_format"], full["dtype"], full["max_model_len"]) == ("dummy", "bfloat16", 64)
    assert full["weight_transfer_config"] == {"backend": "posttrain"}
    assert "enable_lora" not in full
    lora = vllm_start.arguments(spec(12), tmp_path)
    assert (lora["enable_lora"], lora["max_lora_rank"]) == (True, 16)
    assert not {"load_format", "weight_transfer_config"} & set(lora)


def test_cuda_graph_sizes_are_few_and_end_at_vllms_largest(tmp_path: Path) -> None:
    """From 8 on, a batch is padded to less than 1.5 times its size, and not at all if it is one of the sizes."""
    sizes = vllm_start.arguments(spec(None), tmp_path)["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes)) and sizes[-1] == 512 and len(sizes) < 51 / 2
    assert all(b <= 1.5 * a for a, b in pairwise(sizes) if a > 8)
    assert "cudagraph_capture_sizes" not in vllm_start.arguments(spec(None, enforce_eager=True), tmp_path)


def test_sleep_without_a_gpu_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match="sleep needs a GPU"):
        vllm_start.check_settings(Vllm(sleep=True))


def unread() -> Any:
    raise LookupError


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, True),
        ({"hidden_size": 64, "num_attention_heads": 2}, False),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 64}, False),
        ({"hidden_size": 128, "num_attention_heads": 4, "head_dim": 24}, True),
    ],
)
def test_unsupported_head_size_raises(settings: dict[str, int], refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself would raise at the first token, a minute later. 64 / 4 = 16 and 64 / 2 = 32 per head."""
    config = LlamaConfig(**settings)
    monkeypatch.setattr(vllm_start, "cpu_head_sizes", lambda: [32, 64])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    size = settings.get("head_dim", 16)
    if refused:
        with pytest.raises(
            RecipeError, match=rf"head size on a CPU: {size}(.|\n)*supported: 32, 64(.|\n)*transformers"
        ):
            vllm_start.check_heads(lambda: config)
    else:
        vllm_start.check_heads(lambda: config)
    monkeypatch.setattr(vllm_start, "cpu_head_sizes", list)
    vllm_start.check_heads(lambda: config)  # this vLLM has no list: the engine decides
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    vllm_start.check_heads(unread)  # on a GPU too


def test_vllm_without_a_list_of_head_sizes_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    backends = types.ModuleType("vllm.v1.attention.backends.cpu_attn")
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, backends.__name__, backends)
    assert vllm_start.cpu_head_sizes() == []
    backends.CPUAttentionBackend = types.SimpleNamespace(get_supported_head_sizes=lambda: [64, 32])  # type: ignore[attr-defined]
    assert vllm_start.cpu_head_sizes() == [32, 64]


def test_engine_that_cannot_start_raises_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_start, "require_vllm", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match="sleep needs a GPU"):
        check_engine(EngineSection(engine="vllm", vllm=Vllm(sleep=True)), unread)
    with pytest.raises(LookupError):  # accepted after a look at the model
        check_engine(EngineSection(engine="vllm", vllm=Vllm(merge_adapter=True)), unread)
    check_engine(EngineSection(engine="vllm", vllm=Vllm(server=Server(urls=["http://a:1"]))), unread)
    check_engine(EngineSection(), unread)


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("Free memory on device (3/80 GiB) is less than desired", "gpu_memory is 0.3"),
        ("No available memory for the cache blocks.", "gpu_memory is 0.3"),
        ("No available memory for the cache blocks.", "VLLM_CPU_KVCACHE_SPACE is 7 GiB"),
        ("Unsupported CPU attention configuration: head_dim=16", "head size"),
        ("CppCompileError: C++ compile error\nmemory", "must have no space: VLLM_CACHE_ROOT"),
        ("OSError: [Errno 28] No space left on device", "--shm-size"),
        ("CUDA error: an illegal memory access was encountered", "VLLM_LOGGING_LEVEL"),
        ("something else\nwith a second line", "VLLM_LOGGING_LEVEL"),
    ],
)
def test_start_failures_get_a_hint(message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is set by a recipe key on a GPU and by an environment variable on a CPU."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "gpu" in hint)
    error = vllm_start.error_of(ValueError(message), Vllm(), "did not start", tmp_path / "engine.log")
    assert message.splitlines()[0] in str(error) and hint in str(error)
    assert "second line" not in str(error)


def test_argument_errors_of_vllm_are_reported(tmp_path: Path) -> None:
    """pydantic's first line only counts the errors."""
    with pytest.raises(ValidationError) as caught:
        Vllm(max_model_len=0)
    error = vllm_start.error_of(caught.value, Vllm(), "did not start", tmp_path / "engine.log")
    assert "ValidationError: Input should be greater than" in str(error)


def test_sent_weights_contain_tied_weights_once(loaded: LoadedModel) -> None:
    pushed = dict(weights.dense_weights(loaded.model))
    assert set(pushed) == {n for n, _ in loaded.model.named_parameters()}
    assert "lm_head.weight" not in pushed  # tied to the embeddings
    assert not any(t.requires_grad for t in pushed.values())
    name = "model.layers.0.mlp.up_proj.weight"
    assert pushed[name].data_ptr() == loaded.model.get_parameter(name).data_ptr(), "weights were copied"


def test_base_weights_under_an_adapter_keep_their_plain_names(loaded: LoadedModel, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    assert adapter_rank(loaded) is None
    plain = {n: t.clone() for n, t in weights.dense_weights(loaded.model)}
    config = LoraConfig(r=4, target_modules="all-linear", rank_pattern={"up_proj": 20})
    lora = dataclasses.replace(loaded, model=get_peft_model(loaded.model, config))
    assert adapter_rank(lora) == 20
    under = dict(weights.dense_weights(lora.model))
    assert {n: t.tolist() for n, t in under.items()} == {n: t.tolist() for n, t in plain.items()}

    saved = AutoModelForCausalLM.from_pretrained(
        weights.write_base(lora, weights.write_config(lora, tmp_path / "base"), torch.float32)
    )
    ids = torch.tensor([[5, 6, 7]])
    with lora.model.disable_adapter(), torch.no_grad():
        assert torch.equal(saved(ids).logits, lora.model(ids).logits)


def test_engine_dtype_is_the_trainers_compute_dtype(loaded: LoadedModel) -> None:
    assert engine_dtype(loaded) == torch.float32
    assert engine_dtype(dataclasses.replace(loaded, half=torch.bfloat16)) == torch.bfloat16


def test_trainer_probe_log_probs(loaded: LoadedModel) -> None:
    ids = probe_ids(loaded.tokenizer, 10)
    assert len(ids) == 10
    loaded.model.train()
    logps = trainer_logps(loaded, loaded.model, ids)
    assert loaded.model.training
    with torch.no_grad():
        expected = loaded.model.eval()(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert logps == pytest.approx([float(expected[t, ids[t + 1]]) for t in range(9)], abs=1e-5)
    assert mean_gap([1.0, 2.0], [1.5, 1.0]) == 0.75


def test_unwritable_cache_folder_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setitem(sys.modules, "vllm", vllm := types.ModuleType("vllm"))
    vllm.envs = types.SimpleNamespace(VLLM_CACHE_ROOT=str(tmp_path / "file" / "vllm"))  # type: ignore[attr-defined]
    monkeypatch.setenv("VLLM_CACHE_ROOT", "")
    folder = vllm_start.cache_folder()
    assert folder.is_dir() and os.environ["VLLM_CACHE_ROOT"] == str(folder)
    assert "file/vllm  vLLM cannot write its cache there" in capsys.readouterr().err
    vllm.envs = types.SimpleNamespace(VLLM_CACHE_ROOT=str(tmp_path / "vllm"))  # type: ignore[attr-defined]
    assert vllm_start.cache_folder() == tmp_path / "vllm" and not list((tmp_path / "vllm").iterdir())


@pytest.mark.parametrize("side_by_side", [False, True])
def test_failed_start_of_one_engine_closes_the_others(side_by_side: bool) -> None:
    """The others are shut down, and the failed engine's error is raised."""
    ended, begun = list[int](), list[int]()

    def make(number: int) -> Any:
        begun.append(number)
        if number == 1:
            raise EngineError("no memory is left")
        return types.SimpleNamespace(number=number, shutdown=lambda: ended.append(number))

    started = vllm_start.start_together(make, [0, 2], side_by_side=side_by_side)
    assert sorted(llm.number for llm in started) == [0, 2]
    begun.clear()
    with pytest.raises(EngineError, match="no memory is left"):
        vllm_start.start_together(make, [0, 1, 2], side_by_side=side_by_side)
    assert sorted(ended) == [number for number in sorted(begun) if number != 1]
    assert side_by_side or begun == [0, 1], "a third was started though the second had failed"


def test_engines_of_one_gpu_divide_its_memory() -> None:
    assert [Vllm(engines=n).share for n in (1, 2, 3)] == pytest.approx([0.3, 0.15, 0.1])
    assert Vllm(engines=2, gpu_memory=0.5).share == 0.5
    with pytest.raises(ValidationError, match=r"gpu_memory 0\.6 is an engine's share, and 2 of them"):
        Vllm(engines=2, gpu_memory=0.6)


WORKER_0, WORKER_1 = (f"(Worker_TP{n} pid=894{n}) ERROR 11-30 20:58:08 [multiproc_executor.py:953] " for n in (0, 1))
CORE = "(EngineCore pid=8776) ERROR 11-30 20:58:13 [core.py:1510] "
API = "(APIServer pid=8700) "
TRACEBACK = "Traceback (most recent call last):\n"
CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"


def logged(prefix: str, *exceptions: str) -> str:
    """Return a traceback as vLLM logs it: the prefix on every line, which a message ends with a carriage return."""
    stack = '  File "/vllm/v1/worker.py", line 671, in __init__\n    self.load(f"Error: {name}")\n    ^^^^^^^^^\n'
    parts = [one if one.startswith("\n") else f"{TRACEBACK}{stack}{one}\n" for one in exceptions]
    text = "".join(["It failed to start.\n", *parts]).removesuffix("\n")
    return prefix + text.replace("\n", f"\r\n{prefix}") + "\n"


NO_WORKER = logged(
    CORE,
    "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root"
    " cause.",
)
NO_CORE = f"{API}{TRACEBACK}{API}RuntimeError: Engine core initialization failed. See root cause above. Failed: {{}}\n"
PEER = "RuntimeError: [tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:15745."
LOST = logged(WORKER_0, PEER)
FULL = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
DEAD = logged(CORE, "RuntimeError: Worker failed with error 'x', please check the stack trace above for the root cause")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (logged(WORKER_1, f"torch.{FULL}") + LOST + NO_WORKER + NO_CORE, FULL),
        (LOST + NO_WORKER, PEER),
        (logged(WORKER_1, "KeyError: 'a'", CAUSED, "RuntimeError: not loaded") + DEAD, "KeyError: 'a'"),
        (logged(WORKER_1, "KeyError: 'a'", MEANWHILE, "ValueError: no model a") + NO_WORKER, "ValueError: no model a"),
        (logged(WORKER_1, "RuntimeError: cancelled", CAUSED, "OSError: no disk"), "OSError: no disk"),
        (logged(WORKER_1, "AssertionError") + NO_WORKER, 'AssertionError: self.load(f"Error: {name}")'),
        (
            logged(CORE, "core.ValidationError: 1 validation error for A\n  no b"),
            "ValidationError: 1 validation error for A no b",
        ),
        ("\x1b[36m" + logged(CORE, FULL).replace("\r\n", "\r\n\x1b[36m"), FULL),
        (f"[rank1]: {TRACEBACK}[rank1]:   File 1\n[rank1]: nccl.Error: no link\n" + NO_WORKER, "Error: no link"),
        (f"Exception ignored in: <f>\n{TRACEBACK}  a\nOSError: gone\n{DEAD}x\nTypeError: y", "TypeError: y"),
        (f"{TRACEBACK}  File 1\nOSError: no numpy\n" + logged(CORE, "ValueError: no head"), "ValueError: no head"),
        (logged(CORE.replace("ERROR", "WARNING"), "OSError: slow") + logged(CORE, "ValueError: no"), "ValueError: no"),
    ],
)
def test_root_cause_is_found_in_the_log(log: str, cause: str, tmp_path: Path) -> None:
    """The first failure, without the errors that report it, those that were handled, and the exceptions around it."""
    assert root_cause(log) == cause
    (tmp_path / "engine.log").write_text(log, newline="")
    said = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    error = vllm_start.error_of(said, Vllm(), "did not start", tmp_path / "engine.log")
    assert error.problems[0].what == f"vLLM did not start: {cause}"
    assert (error.problems[0].hint == vllm_start.memory_hint(Vllm())) == ("memory" in cause)


def test_lines_of_two_processes_may_alternate() -> None:
    lines = zip(logged(WORKER_1, "KeyError: 'a'").splitlines(), LOST.splitlines(), strict=True)
    assert root_cause("\n".join(line for pair in lines for line in pair)) == "KeyError: 'a'"


def test_warning_about_an_error_is_not_the_cause() -> None:
    """Such as that of a library which goes on without an extension, in the log of a process that was killed."""
    warning = "/lib/image.py:14: UserWarning: no extension for images: OSError: undefined symbol"
    assert root_cause(f"{warning}\nKilled") == ""
    assert root_cause(f"{warning}\nOSError: no space") == "OSError: no space"


def test_log_without_a_cause_is_quoted(tmp_path: Path) -> None:
    """If neither the exception nor the log has an error, the message has the log's last three lines."""
    log = tmp_path / "engine.log"
    log.write_text("a\nb\n\nc\n" + NO_WORKER.splitlines()[0] + "\n")
    told = rf"{log}:\n    b\n    c\n    {re.escape(NO_WORKER.splitlines()[0])}\n  hint"
    said = RuntimeError("Engine core initialization failed. See root cause above.")
    assert re.search(told, str(vllm_start.error_of(said, Vllm(), "did not start", log)))
    assert re.search(told, str(vllm_start.death_error(3, log, Vllm())))
    log.unlink()
    assert "did not start: RuntimeError: Engine core init" in str(
        vllm_start.error_of(said, Vllm(), "did not start", log)
    )


def test_exception_with_its_own_cause_does_not_need_the_log(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("OSError: an older one\n")
    said = RuntimeError("Worker failed. See root cause above.")
    said.__cause__ = ValueError("no such key")
    error = vllm_start.error_of(said, Vllm(), "failed", tmp_path / "engine.log")
    assert error.problems[0].what == "vLLM failed: ValueError: no such key"


@pytest.mark.parametrize(
    ("code", "log", "told"),
    [
        (-9, "", "vLLM was killed by SIGKILL: the system does this"),
        (1, "ValueError: no such head\n", "vLLM failed: ValueError: no such head"),
        (3, "", "vLLM ended with code 3"),
        (
            1,
            "ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.\n"
            "RuntimeError: Executor failed.\n",
            "vLLM's worker process VllmWorker-1 was killed by SIGKILL: the system does this",
        ),
        (
            1,
            "ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.\n"
            "RuntimeError: cancelled\n",
            "vLLM's worker process VllmWorker-0 has ended: the system does this when memory runs out",
        ),
        (
            1,
            "OSError: no disk\nWorker proc A died unexpectedly, shut\nRuntimeError: cancelled\n",
            "vLLM failed: OSError",
        ),
        (
            None,
            "ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: 7)\n",
            "vLLM's worker process VllmWorker-0 ended with code 7",
        ),
    ],
)
def test_ended_engine_error_has_the_cause(code: int, log: str, told: str, tmp_path: Path) -> None:
    """Of several workers, the log of the one that ended has the cause, not the log of the process that noticed."""
    (tmp_path / "engine.log").write_text(log)
    with pytest.raises(EngineError, match=told):
        raise vllm_start.death_error(code, tmp_path / "engine.log", Vllm())
