"""Decisions for the tests of what is said of them: policies choose, candidates are written down."""

from gateway.ops import reasons
from gateway.prompt import Prompt
from gateway.proxy.placement.placing import demand_of
from policies import Candidate, CostGroup, Evaluation, Load, make
from policies.outputs import Outputs

TOKENS = 1000
BUSY = Load(requests=2, decoding=2, context_tokens=800)


def replica(name, overlap=0, load=None, **more):
    return name, overlap, load or Load(), more


def decided(
    policy,
    *replicas,
    tokens=TOKENS,
    draw=0.0,
    mode="exact",
    note="",
    outputs=None,
    session=None,
    max_tokens=None,
    path="/v1/chat/completions",
    costs=None,
):
    """As `describe` tells it of a prompt for these replicas."""
    costs, rule = costs or CostGroup(), policy if not isinstance(policy, str) else make(policy)
    candidates = [Candidate(name, overlap, load, costs.add(name), **more) for name, overlap, load, more in replicas]
    outputs = outputs or Outputs()
    prompt = Prompt(
        path, "sim", tokens=tokens, hashes=range(77, 77 + tokens // 16), max_tokens=max_tokens, session=session,
        rendered_chars=4321, mode=mode, note=note,
    )  # fmt: skip
    demand = demand_of(prompt, draw=draw)
    demand.output, demand.residual = outputs.expected(demand)
    choice = rule.choose(demand, candidates, explain=True)
    evaluation = Evaluation(demand, candidates, choice, candidates[choice.index].overlap)
    return reasons.describe(rule, prompt, evaluation, outputs)
