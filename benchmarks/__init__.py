"""Rolecall beside other engines: the same prompts, file and machine, in one alternated run."""
