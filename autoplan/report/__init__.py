"""A plan as something to read: plain text, Markdown, one self-contained HTML page, or a terminal.

``facts`` derives what there is to say from a PlanDocument, once; each renderer only lays it out.
"""

from autoplan.report.html import report_html
from autoplan.report.text import report_markdown, report_text

__all__ = ["report_html", "report_markdown", "report_text"]
