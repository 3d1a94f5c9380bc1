DROP TABLE pending_statements, statement_pushes, statement_rates, statement_requests, statement_rules, statement_subscriptions;
DROP TABLE totals, handovers, leases, daemons, sent_notifications, unsent_notifications, token_routers, subscriptions, tokens, smp_servers;
DROP FUNCTION add_router_leases, delete_router_leases;
