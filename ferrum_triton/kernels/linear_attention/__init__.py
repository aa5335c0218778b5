"""Linear attention: gated delta rule, its convolution, its gates."""
