"""report.html: what a sweep's jobs came to, as one page that needs nothing else."""

from __future__ import annotations

from builder.page.page import as_html

__all__ = ["as_html"]
