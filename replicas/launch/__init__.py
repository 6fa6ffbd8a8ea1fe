"""Engines that the gateway launches: their profiles, devices, ports, processes and exits."""
