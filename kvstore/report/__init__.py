"""`kvstore report`: from access logs and live metrics to what an operator or a buyer asks. docs/REPORT.md says what the figures mean.

files: which Parquet files are logs; database: DuckDB over them, fenced in; figures: the numbers; page and html: how they are shown.
"""
