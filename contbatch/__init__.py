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
    AgedPriority,
    FairShare,
    HfFifo,
    HfPrefillFirst,
    NanoVllm,
    Orca,
    PeakMemory,
    PrefillDecodeBudget,
    SarathiServe,
    ShortestJobFirst,
    StaticBatching,
    VllmV1,
    policy_by_name,
)
from contbatch.policy import Policy
from contbatch.request import FinishReason, PreemptionMode, Priority, Request, RequestStatus, SamplingParams
from contbatch.scheduler import Scheduler
from contbatch.simulator import CostModel, SimulatedExecutor
from contbatch.step import PrefixHit, Step
from contbatch.trace import StepRecord, Trace
from contbatch.workload import Workload, WorkloadRequest, drive

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "AgedPriority",
    "BatchStats",
    "BatchedRequest",
    "BlockPool",
    "BlockReason",
    "Completion",
    "ContbatchError",
    "CostModel",
    "DecodeTask",
    "Engine",
    "Executor",
    "FairShare",
    "FinishReason",
    "FlatBatch",
    "HfFifo",
    "HfPrefillFirst",
    "IterationPlan",
    "Metrics",
    "NanoVllm",
    "Orca",
    "PeakMemory",
    "Policy",
    "PreemptionMode",
    "PrefillDecodeBudget",
    "PrefillTask",
    "PrefixHit",
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
    "ShortestJobFirst",
    "SimulatedExecutor",
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
