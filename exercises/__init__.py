"""Exercises: a student writes functions that were removed from a stage, and a grader compares them with the ladder."""
