"""What a service says of itself."""

from distserve.messages.base import Message, Part, Role, WorkerStatus
from distserve.messages.leases import Endpoint, KVLayout


class Load(Part, frozen=True):
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    tokens_per_s: float = 0.0


class WorkerInfo(Message, frozen=True):
    """A service's entry in the registry, renewed by every heartbeat."""

    worker_id: str
    role: Role
    model: str = ""  # served name
    status: WorkerStatus = "warming"
    reasons: list[str] = []  # why it is degraded
    version: str = ""
    host_key: str = ""
    pid: int = 0
    layout: KVLayout | None = None
    endpoints: list[Endpoint] = []
    transports: list[str] = []  # kinds that it can send or take KV by
    transports_in_use: list[str] = []  # kinds that have carried some between it and the peers that are there
    http_url: str = ""  # what its /metrics and /health are under
    max_model_len: int = 0  # tokens, prompt and output together
    eos_token_ids: list[int] = []
    colocated: bool = False  # a decode worker that takes SubmitRequest
    load: Load = Load()
    beat: int = 0
