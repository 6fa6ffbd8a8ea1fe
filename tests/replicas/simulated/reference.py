"""vLLM v1's scheduling rules written down token by token and block by block, with no care for speed."""

from dataclasses import dataclass, field


@dataclass
class Job:
    id: str
    keys: list  # of every block, also of those that output will fill
    prompt: int
    max_tokens: int
    tokens: int = 0
    computed: int = 0
    blocks: list = field(default_factory=list)
    cached: int | None = None

    def __post_init__(self):
        self.tokens = self.prompt


class Reference:
    def __init__(self, num_blocks, block_size, max_num_seqs, max_num_batched_tokens):
        self.size, self.seqs, self.budget = block_size, max_num_seqs, max_num_batched_tokens
        self.free = list(range(1, num_blocks))
        self.users = dict.fromkeys(self.free, 0)
        self.key_of = {}
        self.holders = {}  # key -> blocks, oldest first
        self.waiting, self.running = [], []

    def step(self):
        """-> (tokens by request in scheduling order, events, ids that got a token, ids that ended)"""
        self.events, scheduled, budget, preempted = [], {}, self.budget, False
        at = 0
        while at < len(self.running) and budget:
            job = self.running[at]
            new = min(job.tokens - job.computed, budget)
            while not self.allocate(job, new, []):
                victim = self.running.pop()
                self.release(victim)
                victim.computed, preempted = 0, True
                self.waiting.insert(0, victim)
                if victim is job:
                    break
            else:
                scheduled[job.id] = new
                budget -= new
                at += 1
                continue
            break
        while self.waiting and budget and not preempted and len(self.running) < self.seqs:
            job = self.waiting[0]
            hits = []
            for key in job.keys[: (job.tokens - 1) // self.size]:
                if not self.holders.get(key):
                    break
                hits.append(self.holders[key][0])
            if -(-job.tokens // self.size) - len(hits) + sum(not self.users[block] for block in hits) > len(self.free):
                break
            self.waiting.pop(0)
            self.running.append(job)
            job.computed = len(hits) * self.size
            if job.cached is None:
                job.cached = job.computed
            new = min(job.tokens - job.computed, budget)
            assert self.allocate(job, new, hits)
            scheduled[job.id] = new
            budget -= new
        return self.finish(scheduled)

    def allocate(self, job, new, hits):
        need = -(-(job.computed + new) // self.size) - len(job.blocks) - len(hits)
        if need > len(self.free) - sum(not self.users[block] for block in hits):
            return False
        for block in hits:
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
        job.blocks += hits
        for _ in range(need):
            block = self.free.pop(0)
            if block in self.key_of:
                key = self.key_of.pop(block)
                self.holders[key].remove(block)
                self.events.append(("removed", key))
            self.users[block] = 1
            job.blocks.append(block)
        for index in range(job.computed // self.size, (job.computed + new) // self.size):
            key, block = job.keys[index], job.blocks[index]
            self.key_of[block] = key
            self.holders.setdefault(key, []).append(block)
            self.events.append(("stored", key))
        return True

    def release(self, job):
        for block in reversed(job.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.insert(len(self.free) if block in self.key_of else 0, block)
        job.blocks = []

    def finish(self, scheduled):
        told, ended = [], []
        for job in list(self.running):
            job.computed += scheduled.get(job.id, 0)
            if job.id not in scheduled or job.computed < job.tokens:
                continue
            job.tokens += 1
            told.append(job.id)
            if job.tokens - job.prompt == job.max_tokens:
                ended.append(job.id)
                self.running.remove(job)
                self.release(job)
        return scheduled, self.events, told, ended

    def abort(self, id):
        for queue in (self.waiting, self.running):
            for job in [job for job in queue if job.id == id]:
                queue.remove(job)
                self.release(job)
