"""Backends: modules with ``why_not(device)`` and ``run(call)``, loaded when a call first needs one."""
