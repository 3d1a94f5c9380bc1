DROP TABLE unsent_notifications;
DROP TABLE sent_notifications;
DROP TABLE subscriptions;
DROP TABLE tokens;
DROP TABLE smp_servers;
DROP TABLE totals;
