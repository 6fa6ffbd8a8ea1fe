"""Engines that are started here: their profiles, devices, ports, processes and ends."""
