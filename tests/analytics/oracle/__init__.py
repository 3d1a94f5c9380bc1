"""All tables of all reports once more, by DuckDB from rollups that DuckDB made: what Spark must give."""
