-- A router has one row, however its address is written; a push tells its client the address as that client wrote it.
ALTER TABLE subscriptions ADD COLUMN spelling TEXT NOT NULL DEFAULT ''; -- hosts:port, if not as in smp_servers
