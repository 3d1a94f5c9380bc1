DROP TABLE pending_statements, statement_pushes, statement_rates, statement_requests, statement_rules, statement_subscriptions;
DROP TABLE totals, leases, daemons, sent_notifications, unsent_notifications, token_routers, subscriptions, tokens, smp_servers;
