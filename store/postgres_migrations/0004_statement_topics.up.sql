-- The topics that the statement gateway watches are dealt out to the daemons whose gateway is on.
ALTER TABLE daemons ADD COLUMN has_gateway boolean NOT NULL DEFAULT false;

INSERT INTO leases (duty, id) SELECT 'topics', part FROM generate_series(0, 15) part;
