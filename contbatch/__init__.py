"""contbatch: continuous batching for language models, small enough to read and to teach with.

`import contbatch` is light: PyTorch, NumPy and the widgets are loaded only by the calls that need them.
"""

from __future__ import annotations

from contbatch.batch import BatchedRequest, BatchStats, FlatBatch, ScheduledBatch
from contbatch.blocks import BlockPool
from contbatch.budget import TokenBudget
from contbatch.config import SchedulerConfig
from contbatch.engine import Completion, Engine, TokenEvent
from contbatch.errors import ContbatchError
from contbatch.executor import Executor, ScriptedExecutor
from contbatch.metrics import Metrics, RequestMetrics, Slo, goodput, summarise
from contbatch.plan import BlockReason, DecodeTask, IterationPlan, PrefillTask
from contbatch.policies import (
    POLICIES,
    NanoVllm,
    PrefillDecodeBudget,
    SarathiServe,
    StaticBatching,
    VllmV1,
    policy_by_name,
)
from contbatch.request import FinishReason, Priority, Request, RequestStatus, SamplingParams
from contbatch.scheduler import Scheduler
from contbatch.step import Policy, Step
from contbatch.trace import StepRecord, Trace
from contbatch.workload import Workload, WorkloadRequest, drive

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "BatchStats",
    "BatchedRequest",
    "BlockPool",
    "BlockReason",
    "Completion",
    "ContbatchError",
    "DecodeTask",
    "Engine",
    "Executor",
    "FinishReason",
    "FlatBatch",
    "IterationPlan",
    "Metrics",
    "NanoVllm",
    "Policy",
    "PrefillDecodeBudget",
    "PrefillTask",
    "Priority",
    "Request",
    "RequestMetrics",
    "RequestStatus",
    "SamplingParams",
    "SarathiServe",
    "ScheduledBatch",
    "Scheduler",
    "SchedulerConfig",
    "ScriptedExecutor",
    "Slo",
    "StaticBatching",
    "Step",
    "StepRecord",
    "TokenBudget",
    "TokenEvent",
    "Trace",
    "VllmV1",
    "Workload",
    "WorkloadRequest",
    "drive",
    "goodput",
    "policy_by_name",
    "summarise",
]
