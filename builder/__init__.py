"""From a declared deployment to tokens: compose, resolve, build, compile, run.

Each step is a module of this package and imports only earlier steps.
"""
