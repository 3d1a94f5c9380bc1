DROP TABLE last_notifications;
DROP TABLE subscriptions;
DROP TABLE tokens;
DROP TABLE smp_servers;
DROP TABLE totals;
