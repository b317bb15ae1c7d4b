"""The supervisor: owns the slab, the chains and the workers; decides, and touches no token on the hot path."""
