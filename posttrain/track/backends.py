"""Experiment tracker backends. Imported only in the tracker process (`follow`)."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from posttrain.run.resolved_recipe import flatten

COLUMNS = ("step", "eval", "prompt", "completion", "reward", "correct", "finish", "tokens", "scores")
MAX_PARAM_CHARACTERS = 500  # characters per value in MLflow


@dataclass(frozen=True)
class Target:
    """Destination of a run in a tracker. folder: in the run directory, for offline data.

    key: the same for every start of the run, different for other runs. resumed: rows were sent before.
    """

    project: str
    name: str
    key: str
    folder: Path
    offline: bool
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False


class Tracker(Protocol):
    """Interface of a tracker. Every method may raise; the tracker is then disabled."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table with columns COLUMNS."""
        ...

    def finish(self, state: str) -> None:
        """Close the run with state `finished`, `stopped`, `failed` or `killed`."""
        ...


class Wandb:
    """Weights & Biases. Offline runs are uploaded later with `wandb sync`."""

    def __init__(self, target: Target) -> None:
        import wandb

        offline = target.offline or not _has_wandb_key()
        target.folder.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        self._run = wandb.init(
            project=target.project,
            name=target.name,
            id=target.key,
            resume=None if offline else "allow",
            dir=str(target.folder),
            mode="offline" if offline else None,
            config=dict(target.config),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=[[row[name] for name in COLUMNS] for row in rows])
        self._run.log({"samples": table}, step=step)

    def finish(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)


def _has_wandb_key() -> bool:
    """Return whether W&B works without a prompt: a key is set or stored, or another mode is selected."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8", errors="replace")


class Tensorboard:
    """TensorBoard event files, written without torch. View them with `tensorboard --logdir runs`."""

    def __init__(self, target: Target) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._metadata, self._tensor = summary_pb2.SummaryMetadata, tensor_pb2.TensorProto
        self._shape = tensor_shape_pb2.TensorShapeProto
        self._writer = EventFileWriter(str(target.folder))
        if not target.resumed:
            lines = [f"| {key} | {_cell(value)} |" for key, value in flatten(target.config).items()]
            self._text("config", 0, "\n".join(["| key | value |", "|---|---|", *lines]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step, values)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        body = ["| " + " | ".join(_cell(row[name]) for name in COLUMNS) + " |" for row in rows]
        self._text("samples", step, "\n".join([*head, *body]))

    def _text(self, tag: str, step: int, text: str) -> None:
        plugin = self._metadata.PluginData(plugin_name="text")
        tensor = self._tensor(
            dtype="DT_STRING",
            string_val=[text.encode("utf-8", "replace")],
            tensor_shape=self._shape(dim=[self._shape.Dim(size=1)]),
        )
        metadata = self._metadata(plugin_data=plugin)
        self._write(step, [self._summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)])

    def _write(self, step: int, values: Sequence[Any]) -> None:
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))
        self._writer.flush()

    def finish(self, state: str) -> None:
        self._text("state", 0, state)
        self._writer.close()


def _cell(value: Any) -> str:
    """Return a value as a Markdown table cell, with markup and control characters escaped."""
    from posttrain.terminal import escape_control_characters

    text = escape_control_characters(str(value)).replace("\\", "\\\\").replace("\n", "\\n")
    return re.sub(r"[|`*_<>&\[\]]", lambda match: f"&#{ord(match[0])};", text)


class Trackio:
    """Trackio: a local store, viewed with `trackio show`; a Space if TRACKIO_SPACE_ID is set."""

    def __init__(self, target: Target) -> None:
        if target.offline:
            os.environ["TRACKIO_DIR"] = str(target.folder)
            os.environ.pop("TRACKIO_SPACE_ID", None)
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=target.project,
            name=target.name,
            config=flatten(target.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        data = [[row[name] for name in COLUMNS] for row in rows]
        self._run.log({"samples": self._trackio.Table(columns=list(COLUMNS), data=data)}, step=step)

    def finish(self, state: str) -> None:
        del state  # trackio has no run state
        self._run.finish()


class Mlflow:
    """MLflow: the server named by MLFLOW_TRACKING_URI, or files in the run directory."""

    def __init__(self, target: Target) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        given = "" if target.offline else os.environ.get("MLFLOW_TRACKING_URI", "")
        self._client = MlflowClient(tracking_uri=given or target.folder.absolute().as_uri())
        found = self._client.get_experiment_by_name(target.project)
        experiment = found.experiment_id if found else self._client.create_experiment(target.project)
        before = self._client.search_runs([experiment], f"tags.posttrain_key = '{target.key}'", max_results=1)
        if before:
            self._id = before[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        run = self._client.create_run(experiment, run_name=target.name, tags={"posttrain_key": target.key})
        self._id = run.info.run_id
        params = [Param(_mlflow_name(k), str(v)[:MAX_PARAM_CHARACTERS]) for k, v in flatten(target.config).items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        records = [self._metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(records), 1000):
            self._client.log_batch(self._id, metrics=records[start : start + 1000])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = {"columns": list(COLUMNS), "data": [[row[name] for name in COLUMNS] for row in rows]}
        self._client.log_dict(self._id, table, f"samples/step-{step:08d}.json")

    def finish(self, state: str) -> None:
        ended = {"finished": "FINISHED", "stopped": "KILLED", "killed": "KILLED"}.get(state, "FAILED")
        self._client.set_terminated(self._id, status=ended)


def _mlflow_name(name: str) -> str:
    """Replace characters that MLflow forbids: `eval/pass@4` becomes `eval/pass_4`."""
    return re.sub(r"[^\w\-./: ]", "_", name)


def _view_wandb(target: Target) -> str:
    if target.offline or not _has_wandb_key():
        return f"wandb sync {shlex.quote(str(target.folder / 'wandb'))}/offline-run-*-{target.key}"
    return f"https://wandb.ai, project {target.project}, run {target.name}"


def _view_trackio(target: Target) -> str:
    kept = f"TRACKIO_DIR={target.folder} " if target.offline else ""
    return f"{kept}trackio show --project {target.project}"


def _view_mlflow(target: Target) -> str:
    given = "" if target.offline else os.environ.get("MLFLOW_TRACKING_URI", "")
    return given or shlex.join(["mlflow", "ui", "--backend-store-uri", str(target.folder)])


VIEW_COMMANDS: Mapping[str, Callable[[Target], str]] = {  # tracker -> the command or address to view the run
    "wandb": _view_wandb,
    "tensorboard": lambda target: shlex.join(["tensorboard", "--logdir", str(target.folder)]),
    "trackio": _view_trackio,
    "mlflow": _view_mlflow,
}
TRACKERS: Mapping[str, Callable[[Target], Tracker]] = {
    "wandb": Wandb,
    "tensorboard": Tensorboard,
    "trackio": Trackio,
    "mlflow": Mlflow,
}
