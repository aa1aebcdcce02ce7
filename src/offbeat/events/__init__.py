"""Every event that a policy receives and every action that it returns.

Events are facts that a worker reports or that the coordinator observes; actions are decisions. Both are
frozen, keyword-only dataclasses of plain data, so that they are sent and written to the run log as they
are. Times are seconds: `now_s` is the coordinator's monotonic clock when the event reached it; every other
`*_s` is a duration measured by the worker itself. This module never reads a clock and imports nothing but
the standard library.

`worker` is an id that is never reused in a job (the rank, for workers present from the start); `step` counts
finished optimizer steps, `round` counts gradient exchanges. `node` is the name of a server or client of the
parameter server, "server-3" or "client-7".
"""

from __future__ import annotations

from typing import TypeAlias

from offbeat.events.gathering import DeliverValue, EndGathering, ValueGiven
from offbeat.events.parameter_server import (
    AggregationJoined,
    AggregationLeft,
    AggregationPaused,
    AssignTask,
    CloseServers,
    ClusterView,
    ForgetClient,
    LostArc,
    Namespace,
    NamespaceRequested,
    NodeEvent,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeResumed,
    NodeSilent,
    Participant,
    PassesEnded,
    Pause,
    ProgressRequested,
    RejectNamespace,
    ServerAddress,
    ServerReachable,
    ServerRemovalRequested,
    ServerTransfer,
    ServerTransferDone,
    ServerUnreachable,
    TaskDone,
    TaskRequested,
    TauSet,
    WorkerGroupAction,
    WorkerGroupJoined,
    WorkerGroupLeft,
    WorkerGroupMember,
    WorkerGroupRejected,
    WorkerGroupRequest,
    WorkerGroupView,
)
from offbeat.events.recipients import Recipient, ToAllWorkers
from offbeat.events.training import (
    AbortJob,
    AnnounceWorkerLost,
    AssignBlocks,
    AssignLateBlock,
    AssignRoundBatch,
    AverageModels,
    BatchesSkipped,
    Block,
    CancelAveraging,
    CheckpointQuery,
    ConsumedSamples,
    ContributionQuery,
    ContributionReport,
    EndEpoch,
    EpochEnded,
    Evaluated,
    ExchangeUnderWay,
    Failed,
    Finished,
    Group,
    Halt,
    Halted,
    JobComplete,
    Joined,
    LateGradientArrived,
    Left,
    Lost,
    ModelsAveraged,
    OuterStateLoaded,
    OuterStep,
    Peer,
    PeerList,
    PeerReachable,
    PeerUnreachable,
    Preempt,
    Preempted,
    Ready,
    RejectPeer,
    ResolveLateBlock,
    SamplesRequested,
    SkipRound,
    StepFinished,
    StepPermit,
    StepsTimed,
    StepTimes,
    Tick,
)
from offbeat.events.validation import (
    EvaluatePart,
    MergeStates,
    PartEvaluated,
    RolledBack,
    SendSnapshot,
    SnapshotTaken,
    StatesMerged,
    ValidationEvent,
    ValidationFinished,
    ValidationStarted,
)

__all__ = [
    "AbortJob",
    "Action",
    "AggregationJoined",
    "AggregationLeft",
    "AggregationPaused",
    "AnnounceWorkerLost",
    "AssignBlocks",
    "AssignLateBlock",
    "AssignRoundBatch",
    "AssignTask",
    "AverageModels",
    "BatchesSkipped",
    "Block",
    "CancelAveraging",
    "CheckpointQuery",
    "CloseServers",
    "ClusterView",
    "ConsumedSamples",
    "ContributionQuery",
    "ContributionReport",
    "DeliverValue",
    "EndEpoch",
    "EndGathering",
    "EpochEnded",
    "EvaluatePart",
    "Evaluated",
    "Event",
    "ExchangeUnderWay",
    "Failed",
    "Finished",
    "ForgetClient",
    "Group",
    "Halt",
    "Halted",
    "JobComplete",
    "Joined",
    "LateGradientArrived",
    "Left",
    "Lost",
    "LostArc",
    "MergeStates",
    "ModelsAveraged",
    "Namespace",
    "NamespaceRequested",
    "NodeEvent",
    "NodeJoined",
    "NodeLeft",
    "NodeLost",
    "NodeResumed",
    "NodeSilent",
    "OuterStateLoaded",
    "OuterStep",
    "PartEvaluated",
    "Participant",
    "PassesEnded",
    "Pause",
    "Peer",
    "PeerList",
    "PeerReachable",
    "PeerUnreachable",
    "Preempt",
    "Preempted",
    "ProgressRequested",
    "Ready",
    "Recipient",
    "RejectNamespace",
    "RejectPeer",
    "ResolveLateBlock",
    "RolledBack",
    "SamplesRequested",
    "SendSnapshot",
    "ServerAddress",
    "ServerReachable",
    "ServerRemovalRequested",
    "ServerTransfer",
    "ServerTransferDone",
    "ServerUnreachable",
    "SkipRound",
    "SnapshotTaken",
    "StatesMerged",
    "StepFinished",
    "StepPermit",
    "StepTimes",
    "StepsTimed",
    "TaskDone",
    "TaskRequested",
    "TauSet",
    "Tick",
    "ToAllWorkers",
    "ValidationEvent",
    "ValidationFinished",
    "ValidationStarted",
    "ValueGiven",
    "WorkerGroupAction",
    "WorkerGroupJoined",
    "WorkerGroupLeft",
    "WorkerGroupMember",
    "WorkerGroupRejected",
    "WorkerGroupRequest",
    "WorkerGroupView",
]

Event: TypeAlias = (
    Joined
    | Ready
    | BatchesSkipped
    | SamplesRequested
    | CheckpointQuery
    | ContributionReport
    | StepFinished
    | LateGradientArrived
    | ExchangeUnderWay
    | StepsTimed
    | Halted
    | Evaluated
    | EpochEnded
    | OuterStateLoaded
    | Preempted
    | ValueGiven
    | SnapshotTaken
    | PartEvaluated
    | StatesMerged
    | RolledBack
    | ModelsAveraged
    | Finished
    | Left
    | Lost
    | PeerUnreachable
    | PeerReachable
    | Failed
    | Tick
    | NodeJoined
    | NodeLeft
    | NodeLost
    | NodeSilent
    | NodeResumed
    | NamespaceRequested
    | AggregationJoined
    | AggregationPaused
    | AggregationLeft
    | ServerRemovalRequested
    | ServerTransferDone
    | ServerUnreachable
    | ServerReachable
    | WorkerGroupJoined
    | WorkerGroupLeft
    | TaskRequested
    | TaskDone
    | TauSet
    | ProgressRequested
)


Action: TypeAlias = (
    PeerList
    | Halt
    | Group
    | AssignBlocks
    | ConsumedSamples
    | StepPermit
    | ContributionQuery
    | AssignLateBlock
    | ResolveLateBlock
    | SkipRound
    | AverageModels
    | CancelAveraging
    | Preempt
    | DeliverValue
    | EndGathering
    | ValidationStarted
    | SendSnapshot
    | EvaluatePart
    | MergeStates
    | ValidationFinished
    | EndEpoch
    | AssignRoundBatch
    | JobComplete
    | CloseServers
    | AbortJob
    | RejectPeer
    | AnnounceWorkerLost
    | ClusterView
    | ForgetClient
    | RejectNamespace
    | WorkerGroupView
    | AssignTask
    | PassesEnded
    | WorkerGroupRejected
)
