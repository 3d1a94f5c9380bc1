DROP TABLE totals, leases, daemons, sent_notifications, unsent_notifications, token_routers, subscriptions, tokens, smp_servers;
