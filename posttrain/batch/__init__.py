"""Rollouts as objects and tensors (`rollouts`), return types of components (`results`), and records of multi-turn
rollouts (`records`). The names of `rollouts` and `results` are re-exported here."""

from __future__ import annotations

from posttrain.batch.results import ChannelAdvantages as ChannelAdvantages
from posttrain.batch.results import Correction as Correction
from posttrain.batch.results import Credit as Credit
from posttrain.batch.results import GroupLoss as GroupLoss
from posttrain.batch.results import PairBatch as PairBatch
from posttrain.batch.results import PairLoss as PairLoss
from posttrain.batch.results import Remembered as Remembered
from posttrain.batch.results import Selection as Selection
from posttrain.batch.results import TokenLoss as TokenLoss
from posttrain.batch.rollouts import CPU as CPU
from posttrain.batch.rollouts import TRAINED as TRAINED
from posttrain.batch.rollouts import CallKind as CallKind
from posttrain.batch.rollouts import CallRecord as CallRecord
from posttrain.batch.rollouts import Extras as Extras
from posttrain.batch.rollouts import FinishReason as FinishReason
from posttrain.batch.rollouts import Node as Node
from posttrain.batch.rollouts import Prompt as Prompt
from posttrain.batch.rollouts import PromptImages as PromptImages
from posttrain.batch.rollouts import RemoteTokens as RemoteTokens
from posttrain.batch.rollouts import Rollout as Rollout
from posttrain.batch.rollouts import RolloutBatch as RolloutBatch
from posttrain.batch.rollouts import Segment as Segment
from posttrain.batch.rollouts import Stored as Stored
from posttrain.batch.rollouts import ToolCall as ToolCall
from posttrain.batch.rollouts import Turn as Turn
from posttrain.batch.rollouts import Variant as Variant
from posttrain.batch.rollouts import WorkflowCall as WorkflowCall
from posttrain.batch.rollouts import concatenate_ranges as concatenate_ranges
from posttrain.batch.rollouts import join_images as join_images
from posttrain.batch.rollouts import pad_rows as pad_rows
from posttrain.batch.rollouts import row_mean as row_mean
from posttrain.batch.rollouts import to_device as to_device
