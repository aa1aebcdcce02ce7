"""Averaging the models of workers that each train their own."""
