"""Requests of classes and limits: the queue, what lower classes give up, and priorities for engines."""
