"""The truth: float64 references that start at checkpoint bytes and never import the code under test."""
