"""What is asked: MoE layers as frozen values, their checkpoints and their batches."""
