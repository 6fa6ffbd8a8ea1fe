"""Admission by service classes and limits: the queue, the limits of lower classes, and priorities for engines."""
