"""The distribution that filtered sampling draws from, by sorting; what draws are held against."""

import torch


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Of float32 logits [vocab_size]: temperature, then top-k, then top-p among those kept."""
    logits = logits.masked_fill(logits.isnan(), -torch.inf)
    logits = (logits - logits.max()) / temperature
    if 0 < top_k < logits.numel():
        kept = logits.topk(top_k).indices
        logits = torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept])
    weights = torch.softmax(logits, dim=0)
    if top_p < 1:
        ordered, order = weights.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered  # the probability of what is likelier
        weights = weights.index_fill(0, order[before >= top_p], 0.0)
    return weights / weights.sum()
