"""Prediction and evaluation with a trained net."""
