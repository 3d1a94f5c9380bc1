DELETE FROM leases WHERE duty = 'topics';

ALTER TABLE daemons DROP COLUMN has_gateway;
