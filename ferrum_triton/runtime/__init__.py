"""Turning logits into text: sampling and the generation loop."""
